"""The dynamic client of the `kubernetes` package, with time limits and errors that say what to do.

Imported by `kube_client.connect` only: `clickline deploy render` works without that package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient, Resource
from urllib3 import exceptions as http

from clickline.deploy.kube_client import ApiError
from clickline.errors import ClusterError

_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<part>\w+))?)?"
)
"""The path of objects, an object or a subresource."""


class ResourceTypes:
    """The kinds of the cluster, each API version loaded when first needed.

    The library's own discoverers keep a cache in /tmp, which another user could have written, have no time limit, and
    load everything again for each kind that is missing.
    """

    def __init__(self, client: ApiRequests, cache_file: str | None) -> None:
        self._client = client
        self._loaded: dict[str, list[Any]] = {}

    def of_version(self, api_version: str) -> list[Any]:
        """All kinds of an API version that can be listed; empty if the server does not have the version."""
        if api_version not in self._loaded:
            group, _, version = api_version.rpartition("/")
            prefix = "apis" if group else "api"
            try:
                found = self._client.request("GET", f"/{prefix}/{api_version}")["resources"]
            except ApiError as refused:
                if refused.status != 404:
                    raise
                found = []
            self._loaded[api_version] = [
                Resource(prefix, group, version, client=self._client, **_known_fields(one))  # type: ignore[no-untyped-call]
                for one in found
                if "/" not in one["name"] and "list" in one["verbs"]
            ]
        return self._loaded[api_version]


def _known_fields(resource: dict[str, Any]) -> dict[str, Any]:
    return {key: resource[key] for key in ("kind", "namespaced", "verbs", "name")}


class ApiRequests(DynamicClient):
    """Requests to the API server. Raises `ApiError` if the server rejects one, `ClusterError` for any other failure."""

    def __init__(self, api: Any, where: str) -> None:
        self.where = where
        self.host: str = api.configuration.host
        self.warnings: list[str] = []
        super().__init__(api, discoverer=ResourceTypes)  # type: ignore[no-untyped-call]

    def request(
        self, method: str, path: str, body: Any = None, *, seconds: float = _READ_SECONDS, **params: Any
    ) -> Any:
        """The JSON of the response; with `serialize=False` the response itself, not read yet."""
        serialize = params.pop("serialize", True)
        timeouts = (_CONNECT_SECONDS, seconds)
        with self.errors(method, path, seconds):
            response = super().request(
                method, path, body, serialize=False, _request_timeout=timeouts, **params
            )
            for warning in response.headers.getlist("Warning"):
                text = re.sub(r'^\d+ \S+ "(.*)"$', r"\1", warning)
                if text not in self.warnings:
                    self.warnings.append(text)
            if not serialize:
                return response
            data = response.data
        try:
            return json.loads(data)
        except ValueError as error:
            raise ClusterError(
                f"{self.host} ({self.where}) does not answer as a Kubernetes API does: {data[:80]!r}. "
                "Check the server's address in the kubeconfig, and whether a proxy answers in its place."
            ) from error

    @contextmanager
    def errors(self, method: str, path: str, seconds: float) -> Iterator[None]:
        """Translate the library's errors."""
        try:
            yield
        except ApiException as error:
            if error.status:
                raise self.api_error(error.status, error.body or "", method, path) from error
            raise ClusterError(  # the library's way to report a TLS error
                f"{self.host} ({self.where}) failed the TLS check: {reason(error.reason)}. "
                "Check certificate-authority in the kubeconfig."
            ) from error
        except http.ReadTimeoutError as error:
            raise ClusterError(
                f"{self.host} ({self.where}) did not answer within {seconds:.0f} s. Try again; "
                "if it persists, the cluster's control plane is overloaded or partly down."
            ) from error
        except http.ProtocolError as error:
            raise ClusterError(
                f"{self.host} ({self.where}) closed the connection: {reason(error)}. Try again."
            ) from error
        except http.HTTPError as error:
            raise ClusterError(
                f"{self.host} ({self.where}) cannot be reached: {reason(error)}. Check that the cluster runs "
                "and that this machine may reach it; --context or KUBECONFIG chooses another one."
            ) from error

    def api_error(self, status: int, body: str | bytes, method: str, path: str) -> ApiError:
        """The error for a rejected request."""
        try:
            document = json.loads(body)
            sent_by_api = (document["kind"], document["apiVersion"]) == ("Status", "v1")
        except (ValueError, TypeError, KeyError):
            sent_by_api = False
        text = body if isinstance(body, str) else body.decode(errors="replace")
        message = str(document.get("message") or "") if sent_by_api else text[:200].strip()
        details = (document.get("details") or {}) if sent_by_api else {}
        causes = [
            (str(one.get("field", "")), str(one.get("message", ""))) for one in details.get("causes") or ()
        ]
        if status == 401:
            explained = (
                f"{self.host} does not accept the credentials of {self.where} (401). Log in to the cluster again, "
                "or choose another context with --context."
            )
        elif status == 403 and (not message or "cannot " in message):
            verb, resource, place = _permission(method, path)
            explained = (
                f"{self.host} does not let the user of {self.where} {verb} {resource}{place} (403). "
                f"Ask for this permission: verb {verb}, resource {resource}; or choose another context with --context. "
                f"Server: {message or 'no message'}"
            )
        else:
            explained = f"{message or 'no reason was given'} ({status})"
        return ApiError(explained, status, message, causes, sent_by_api=sent_by_api)


def _permission(method: str, path: str) -> tuple[str, str, str]:
    """The verb and the resource that a request needs, and where."""
    found = _PATH.match(path)
    if found is None:
        return "get", "APIs", ""
    group, namespace, plural, name, part = found.groups()
    verb = {"GET": "get" if name else "list", "EXEC": "get and create"}.get(method.upper(), method.lower())
    resource = plural + (f".{group}" if group else "") + (f"/{part}" if part else "")
    return verb, resource, f" in namespace {namespace}" if namespace else ""


def reason(error: object) -> str:
    """The reason of a failed connection without the repr of the objects around it."""
    text = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return re.sub(r"^.*?>?: (?=Failed|\[)|\(_ssl\.c:\d+\)", "", text).strip(" .")
