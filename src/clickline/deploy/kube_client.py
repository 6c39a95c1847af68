"""A client of the Kubernetes API: plain objects in, plain objects out, errors with a remedy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clickline.deploy.exec_process import ExecProcess
from clickline.deploy.objects import Object
from clickline.errors import ClusterError

MANAGER = "clickline"
_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_PAGE = 500
_PROXY_SECONDS = 3
_CONNECTIONS = 64  # kept open: one for each container whose log is followed
_FOLLOW_SECONDS = 60


class ApiError(ClusterError):
    """The API server rejected a request. `causes` are the (field, message) pairs of an invalid object."""

    def __init__(self, text: str, status: int, message: str, causes: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.message = message
        self.causes = tuple(causes)


@dataclass(frozen=True)
class Resource:
    """How objects of one kind are addressed in the API."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool

    def path(self, namespace: str | None, name: str = "") -> str:
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        inside = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{inside}/{self.plural}" + (f"/{name}" if name else "")

    @property
    def full_name(self) -> str:
        group = self.api_version.rpartition("/")[0]
        return f"{self.plural}.{group}" if group else self.plural


def describe(item: Object) -> str:
    """An object's name in messages: Deployment ads-predictor."""
    return f"{item['kind']} {item['metadata']['name']}"


def label(item: Object, key: str) -> str | None:
    """One of the app.kubernetes.io labels that all our objects have."""
    found = (item["metadata"].get("labels") or {}).get(f"app.kubernetes.io/{key}")
    return None if found is None else str(found)


def connect(context: str | None = None) -> Kube:
    """A client for the user's kubeconfig or, inside a pod, for its own cluster."""
    from kubernetes import client, config

    files = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    existing = [path for path in files.split(os.pathsep) if path and Path(path).expanduser().is_file()]
    if existing:
        api, name = _from_kubeconfig(os.pathsep.join(existing), context)
    elif context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        settings = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise ClusterError(
                f"this looks like a pod, but it cannot use the API of its cluster: {error} "
                "Give it a service account with automountServiceAccountToken, or set KUBECONFIG."
            ) from error
        api, name = client.ApiClient(settings), "this pod's cluster"
    else:
        raise ClusterError(
            f"no kubeconfig was found: {files} does not exist. Set KUBECONFIG to the file of your cluster, "
            "or have your cluster's tool write one (minikube, kind and the clouds' tools do); "
            "`kubectl config get-contexts` lists the contexts."
        )
    # Fail at once: the library would retry a dead address several times, with warnings of its own.
    api.configuration.retries = False
    api.configuration.connection_pool_maxsize = _CONNECTIONS
    return Kube(client.ApiClient(api.configuration), name)


def _from_kubeconfig(files: str, context: str | None) -> tuple[Any, str]:
    import yaml
    from kubernetes import config

    try:
        contexts, current = config.list_kube_config_contexts(files)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        if context is None or "current-context" not in str(error):
            raise ClusterError(
                f"{files}: {error}. Choose a context with `kubectl config use-context` or --context."
            ) from error
        contexts, current = None, None
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ClusterError(
            f"{files} is not a kubeconfig: {str(error).splitlines()[0]}. Set KUBECONFIG to the right file."
        ) from error
    names = [one["name"] for one in contexts or ()]
    if contexts is not None and context is not None and context not in names:
        raise ClusterError(
            f"{files} has no context {context!r}. Allowed: {', '.join(sorted(names)) or 'it has none'}."
        )
    name = context or current["name"]
    try:
        api = config.new_client_from_config(files, name, persist_config=False)  # type: ignore[no-untyped-call]
    except (config.ConfigException, KeyError, TypeError, OSError) as error:
        raise ClusterError(
            f"context {name} of {files} cannot be used: {error}. "
            "`kubectl config view` shows what it lacks; `kubectl version` shows whether kubectl can use it."
        ) from error
    return api, f"context {name}"


class Kube:
    """The API's verbs on plain objects. Raises `ApiError` if the server rejects a request, `ClusterError` for any other
    failure."""

    def __init__(self, api: Any, where: str) -> None:
        self._api = api
        self.where = where
        self.host: str = api.configuration.host
        self.warnings: list[str] = []
        """Warnings of the server, each once: deprecated fields, pods that a policy will not admit."""
        self._resource_cache: dict[str, list[Resource] | None] = {}

    def close(self) -> None:
        self._api.rest_client.close()

    # ── kinds ──────────────────────────────────────────────────────────────────────────────────

    def resource(self, api_version: str, kind: str) -> Resource | None:
        """The resource of a kind; None if the server does not have it."""
        found = self._resources(api_version) or ()
        return next((one for one in found if one.kind == kind), None)

    def versions(self, group: str) -> list[str]:
        """The versions of an API group that the server has; empty if it does not have the group."""
        try:
            return [
                one["version"] for one in self._json("GET", f"/apis/{group}", ("get", "APIs"))["versions"]
            ]
        except ApiError as refused:
            if refused.status != 404:
                raise
            return []

    def namespaced_resources(self) -> list[Resource]:
        """Every namespaced kind that can be listed, in the server's preferred version."""
        groups = self._json("GET", "/apis", ("list", "APIs"))["groups"]
        preferred = ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]
        return [one for version in preferred for one in self._resources(version) or () if one.namespaced]

    def _resources(self, api_version: str) -> list[Resource] | None:
        if api_version not in self._resource_cache:
            root = "/apis" if "/" in api_version else "/api"
            try:
                found = self._json("GET", f"{root}/{api_version}", ("get", "APIs"))["resources"]
            except ApiError as refused:
                if refused.status != 404:
                    raise
                self._resource_cache[api_version] = None
            else:
                self._resource_cache[api_version] = [
                    Resource(api_version, one["kind"], one["name"], one["namespaced"])
                    for one in found
                    if "/" not in one["name"] and "list" in one["verbs"]
                ]
        return self._resource_cache[api_version]

    def _resource_of(self, api_version: str, kind: str) -> Resource:
        found = self.resource(api_version, kind)
        if found is None:
            raise ClusterError(f"the cluster of {self.where} has no {kind} of {api_version}")
        return found

    # ── objects ────────────────────────────────────────────────────────────────────────────────

    def apply(self, item: Object, *, dry_run: bool = False) -> Object:
        """Create or change an object by server-side apply; returns it with what the server adds."""
        resource = self._resource_of(item["apiVersion"], item["kind"])
        metadata = item["metadata"]
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        applied: Object = self._json(
            "PATCH",
            resource.path(metadata.get("namespace"), metadata["name"]),
            ("patch", resource.full_name),
            query,
            body=json.dumps(item),
        )
        return applied

    def patch(self, item: Object, changes: Mapping[str, Any], subresource: str = "") -> Object:
        """Change single fields by merge patch, also those that other managers own and an apply cannot remove. None
        removes a field. `subresource` is, for example, scale."""
        resource = self._resource_of(item["apiVersion"], item["kind"])
        metadata = item["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"]) + (
            f"/{subresource}" if subresource else ""
        )
        full_name = f"{resource.full_name}/{subresource}" if subresource else resource.full_name
        patched: Object = self._json("PATCH", path, ("patch", full_name), body=changes)
        return patched

    def get(
        self, api_version: str, kind: str, name: str, namespace: str | None = None, subresource: str = ""
    ) -> Object | None:
        resource = self._resource_of(api_version, kind)
        path = resource.path(namespace, name) + (f"/{subresource}" if subresource else "")
        full_name = f"{resource.full_name}/{subresource}" if subresource else resource.full_name
        try:
            item: Object = self._json("GET", path, ("get", full_name))
        except ApiError as refused:
            if refused.status != 404:
                raise
            return None
        return item

    def live(self, item: Object) -> Object | None:
        """The object of the same kind and name on the server; None if there is none."""
        metadata = item["metadata"]
        return self.get(item["apiVersion"], item["kind"], metadata["name"], metadata.get("namespace"))

    def list(
        self,
        api_version: str,
        kind: str,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[Object]:
        """All objects of a kind with these labels; empty if the server does not have the kind."""
        resource = self.resource(api_version, kind)
        if resource is None:
            return []
        query = {"limit": str(_PAGE)}
        if labels:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in labels.items())
        found: list[Object] = []
        while True:
            page = self._json("GET", resource.path(namespace), ("list", resource.full_name), query)
            # The items of a list lack apiVersion and kind.
            found += [{**item, "apiVersion": api_version, "kind": kind} for item in page.get("items") or ()]
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return found
            query["continue"] = following

    def delete(self, item: Object, *, propagation: str = "Background") -> None:
        """Delete an object and its dependents, if it still exists.

        Only the very object that was read: another one created under the same name meanwhile stays.
        """
        resource = self._resource_of(item["apiVersion"], item["kind"])
        metadata = item["metadata"]
        options: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": propagation,
        }
        if "uid" in metadata:
            options["preconditions"] = {"uid": metadata["uid"]}
        try:
            path = resource.path(metadata.get("namespace"), metadata["name"])
            self._json("DELETE", path, ("delete", resource.full_name), body=options)
        except ApiError as refused:
            if refused.status not in (404, 409):
                raise

    # ── pods ───────────────────────────────────────────────────────────────────────────────────

    def log(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
        since: str | None = None,
    ) -> Iterator[str]:
        """The lines of a container's log, each with its time in front."""
        query = {"container": container, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        query |= {"previous": "true"} if previous else {}
        query |= {"tailLines": str(tail)} if tail is not None else {}
        query |= {"sinceTime": since} if since is not None else {}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        seconds = _FOLLOW_SECONDS if follow else _READ_SECONDS
        response = self._send("GET", path, ("get", "pods/log"), query, seconds=seconds)
        with self._network_errors(seconds):
            rest = b""
            for chunk in response.response.stream():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")

    def proxy_get(
        self, namespace: str, pod: str, port: int, path: str, *, tls: bool = False
    ) -> tuple[int, str]:
        """GET from a pod through the API server's proxy: HTTP status and text. Raises `ApiError` if the API server
        itself responds, because it cannot reach the pod or this user may not."""
        target = f"{'https:' if tls else ''}{pod}:{port}"
        whole = f"/api/v1/namespaces/{namespace}/pods/{target}/proxy{path}"
        response = self._raw("GET", whole, {}, None, _PROXY_SECONDS)
        with self._network_errors(_PROXY_SECONDS):
            data = response.read()
        if response.status >= 300 and _is_status_object(data):
            raise self._api_error(response.status, data, ("get", "pods/proxy"), whole)
        return response.status, data.decode(errors="replace")

    @contextmanager
    def exec(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[ExecProcess]:
        """Run a command in a container."""
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url
        from websocket import WebSocketBadStatusException, WebSocketException

        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
        query = [("container", container), *(("command", word) for word in command)]
        query += [(stream, "true") for stream in ("stdin", "stdout", "stderr")]
        _, url, headers, *_ = self._api.param_serialize(
            "GET", path, query_params=query, header_params={}, auth_settings=["BearerToken"]
        )
        try:
            address = get_websocket_url(url)  # type: ignore[no-untyped-call]
            socket = create_websocket(self._api.configuration, address, headers)  # type: ignore[no-untyped-call]
        except WebSocketBadStatusException as error:
            body = error.resp_body or b""
            raise self._api_error(error.status_code, body, ("get and create", "pods/exec"), path) from error
        except (WebSocketException, OSError) as error:
            raise ClusterError(
                f"{self.host} ({self.where}) cannot be reached: {_reason(error)}. Try again."
            ) from error
        process = ExecProcess(socket)
        try:
            yield process
        finally:
            process.close()

    # ── requests ───────────────────────────────────────────────────────────────────────────────

    def _json(
        self,
        method: str,
        path: str,
        what: tuple[str, str],
        query: Mapping[str, str] | None = None,
        body: str | Mapping[str, Any] | None = None,
    ) -> Any:
        response = self._send(method, path, what, query, body)
        with self._network_errors(_READ_SECONDS):
            data = response.read()
        try:
            return json.loads(data)
        except ValueError as error:
            raise ClusterError(
                f"{self.host} ({self.where}) does not answer as a Kubernetes API does: {data[:80]!r}. "
                "Check the server's address in the kubeconfig, and whether a proxy answers in its place."
            ) from error

    def _send(
        self,
        method: str,
        path: str,
        what: tuple[str, str],
        query: Mapping[str, str] | None = None,
        body: str | Mapping[str, Any] | None = None,
        seconds: float = _READ_SECONDS,
    ) -> Any:
        response = self._raw(method, path, query or {}, body, seconds)
        for warning in response.headers.getlist("Warning"):
            text = re.sub(r'^\d+ \S+ "(.*)"$', r"\1", warning)
            if text not in self.warnings:
                self.warnings.append(text)
        if response.status >= 300:
            with self._network_errors(seconds):
                raise self._api_error(response.status, response.read(), what, path)
        return response

    def _raw(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: str | Mapping[str, Any] | None,
        seconds: float,
    ) -> Any:
        # An apply carries its own text (JSON is YAML); everything else is JSON that the library writes.
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        if isinstance(body, str):
            kind = "application/apply-patch+yaml"
        headers = {"Accept": "application/json", "Content-Type": kind}
        with self._network_errors(seconds):
            made = self._api.param_serialize(
                method,
                path,
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            verb, url, sent, content = made[:4]
            return self._api.call_api(
                verb, url, header_params=sent, body=content, _request_timeout=(_CONNECT_SECONDS, seconds)
            )

    @contextmanager
    def _network_errors(self, seconds: float) -> Iterator[None]:
        """Translate network errors to ClusterError."""
        from kubernetes.client.exceptions import ApiException
        from urllib3 import exceptions as http

        try:
            yield
        except ApiException as error:  # only raised for TLS errors
            raise ClusterError(
                f"{self.host} ({self.where}) failed the TLS check: {_reason(error.reason)}. "
                "Check certificate-authority in the kubeconfig."
            ) from error
        except http.ReadTimeoutError as error:
            raise ClusterError(
                f"{self.host} ({self.where}) did not answer within {seconds:.0f} s. Try again; "
                "if it persists, the cluster's control plane is overloaded or partly down."
            ) from error
        except http.ProtocolError as error:
            raise ClusterError(
                f"{self.host} ({self.where}) closed the connection: {_reason(error)}. Try again."
            ) from error
        except http.HTTPError as error:
            raise ClusterError(
                f"{self.host} ({self.where}) cannot be reached: {_reason(error)}. Check that the cluster runs "
                "and that this machine may reach it; --context or KUBECONFIG chooses another one."
            ) from error

    def _api_error(self, status: int, data: bytes, what: tuple[str, str], path: str) -> ApiError:
        try:
            document = json.loads(data)
            message = str(document.get("message") or "")
            details = document.get("details") or {}
        except (ValueError, AttributeError):
            message, details = data[:200].decode(errors="replace").strip(), {}
        causes = [
            (str(one.get("field", "")), str(one.get("message", ""))) for one in details.get("causes") or ()
        ]
        verb, resource = what
        inside = re.search(r"/namespaces/([^/]+)/", path)
        place = f" in namespace {inside[1]}" if inside else ""
        if status == 401:
            text = (
                f"{self.host} does not accept the credentials of {self.where} (401). Log in to the cluster again, "
                "or choose another context with --context."
            )
        elif status == 403 and (not message or "cannot " in message):
            text = (
                f"{self.host} does not let the user of {self.where} {verb} {resource}{place} (403). "
                f"Ask for this permission: verb {verb}, resource {resource}; or choose another context with --context. "
                f"Server: {message or 'no message'}"
            )
        else:
            text = f"{message or 'no reason was given'} ({status})"
        return ApiError(text, status, message, causes)


def _is_status_object(data: bytes) -> bool:
    """Whether a response is a Status object of the API server, which our pods never send."""
    try:
        document = json.loads(data)
    except ValueError:
        return False
    return isinstance(document, dict) and (document.get("kind"), document.get("apiVersion")) == (
        "Status",
        "v1",
    )


def _reason(error: object) -> str:
    """The reason of a failed connection without the repr of the objects around it."""
    text = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return re.sub(r"^.*?>?: (?=Failed|\[)|\(_ssl\.c:\d+\)", "", text).strip(" .")
