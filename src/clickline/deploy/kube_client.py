"""A client of the Kubernetes API: plain objects in, plain objects out, errors with a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from clickline.deploy.exec_process import ExecProcess
from clickline.deploy.objects import Object
from clickline.errors import ClusterError

_MANAGER = "clickline"
_PAGE = 500
_PROXY_SECONDS = 3
_LOG_SECONDS, _FOLLOW_SECONDS = 30, 60
_CONNECTIONS = 64  # kept open: one for each container whose log is followed


_P = ParamSpec("_P")
_T = TypeVar("_T")


class ApiError(ClusterError):
    """The API server rejected a request. `causes` are the (field, message) pairs of an invalid object. `sent_by_api`:
    the API server itself responded, not a pod behind its proxy."""

    def __init__(
        self,
        text: str,
        status: int,
        message: str,
        causes: Sequence[tuple[str, str]] = (),
        *,
        sent_by_api: bool = True,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.message = message
        self.causes = tuple(causes)
        self.sent_by_api = sent_by_api


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


def if_allowed(call: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T | ApiError:
    """The result of a call; if this user may not make it, the error that says so."""
    try:
        return call(*args, **options)
    except ApiError as refused:
        if refused.status != 403:
            raise
        return refused


def _unless_missing(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call; None if the server has no such object."""
    try:
        return call(*args)
    except ApiError as refused:
        if refused.status != 404:
            raise
        return None


class Kube:
    """The API's verbs on plain objects. Raises `ApiError` if the server rejects a request, `ClusterError` for any other
    failure."""

    def __init__(self, api: Any, where: str) -> None:
        from clickline.deploy.api_requests import ApiRequests

        self._requests = ApiRequests(api, where)
        self.where = where
        self.host = self._requests.host
        self.warnings = self._requests.warnings
        """Warnings of the server, each once: deprecated fields, pods that a policy will not admit."""

    def __enter__(self) -> Kube:
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.client.rest_client.close()

    # ── kinds ──────────────────────────────────────────────────────────────────────────────────

    def resource(self, api_version: str, kind: str) -> Any | None:
        """The resource of a kind (`kubernetes.dynamic.Resource`); None if the server does not have it."""
        found = self._requests.resources.of_version(api_version)
        return next((one for one in found if one.kind == kind), None)

    def versions(self, group: str) -> list[str]:
        """The versions of an API group that the server has; empty if it does not have the group."""
        found = _unless_missing(self._requests.request, "GET", f"/apis/{group}") or {"versions": []}
        return [one["version"] for one in found["versions"]]

    def namespaced_resources(self) -> list[Any]:
        """Every namespaced resource that can be listed, in the server's preferred version."""
        groups = self._requests.request("GET", "/apis")["groups"]
        preferred = ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]
        resources = self._requests.resources
        return [one for version in preferred for one in resources.of_version(version) if one.namespaced]

    def _resource(self, api_version: str, kind: str) -> Any:
        found = self.resource(api_version, kind)
        if found is None:
            raise ClusterError(f"the cluster of {self.where} has no {kind} of {api_version}")
        return found

    def _resource_of(self, item: Object) -> Any:
        return self._resource(item["apiVersion"], item["kind"])

    # ── objects ────────────────────────────────────────────────────────────────────────────────

    def apply(self, item: Object, *, dry_run: bool = False) -> Object:
        """Create or change an object by server-side apply; returns it with what the server adds."""
        applied: Object = self._resource_of(item).server_side_apply(
            item,
            force_conflicts=True,
            field_manager=_MANAGER,
            dry_run="All" if dry_run else None,
            query_params=[("fieldValidation", "Strict")],
        )
        return applied

    def patch(self, item: Object, changes: Mapping[str, Any]) -> None:
        """Change single fields by merge patch, also those that other managers own and an apply cannot remove. None
        removes a field."""
        metadata = item["metadata"]
        self._resource_of(item).patch(
            changes, metadata["name"], metadata.get("namespace"), content_type="application/merge-patch+json"
        )

    def get_scale(self, name: str, namespace: str) -> Object | None:
        """The scale of a StatefulSet."""
        scale: Object | None = _unless_missing(
            self._requests.request, "GET", self._scale_path(name, namespace)
        )
        return scale

    def set_scale(self, name: str, namespace: str, replicas: int) -> None:
        self._requests.request(
            "PATCH",
            self._scale_path(name, namespace),
            {"spec": {"replicas": replicas}},
            content_type="application/merge-patch+json",
        )

    def _scale_path(self, name: str, namespace: str) -> str:
        return f"{self._resource('apps/v1', 'StatefulSet').path(name, namespace)}/scale"

    def get(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> Object | None:
        item: Object | None = _unless_missing(self._resource(api_version, kind).get, name, namespace)
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
        selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items()) or None
        found: list[Object] = []
        following = None
        while True:
            page = resource.get(
                namespace=namespace, label_selector=selector, limit=_PAGE, _continue=following
            )
            # The items of a list lack apiVersion and kind.
            found += [{**item, "apiVersion": api_version, "kind": kind} for item in page.get("items") or ()]
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return found

    def delete(self, item: Object, *, propagation: str = "Background") -> None:
        """Delete an object and its dependents, if it still exists.

        Only the very object that was read: another one created under the same name meanwhile stays.
        """
        metadata = item["metadata"]
        options: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": propagation,
        }
        if "uid" in metadata:
            options["preconditions"] = {"uid": metadata["uid"]}
        try:
            self._resource_of(item).delete(metadata["name"], metadata.get("namespace"), options)
        except ApiError as refused:
            if refused.status not in (404, 409):
                raise

    # ── pods ───────────────────────────────────────────────────────────────────────────────────

    def log(self, namespace: str, pod: str, container: str, **options: str) -> Iterator[str]:
        """The lines of a container's log, each with its time in front. `options` are the API's: follow, previous,
        tailLines, sinceTime."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        query = [("container", container), ("timestamps", "true"), *options.items()]
        seconds = _FOLLOW_SECONDS if "follow" in options else _LOG_SECONDS
        response = self._requests.request("GET", path, seconds=seconds, serialize=False, query_params=query)
        with self._requests.errors("GET", path, seconds):
            rest = b""
            for chunk in response.stream():
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
        try:
            response = self._requests.request("GET", whole, seconds=_PROXY_SECONDS, serialize=False)
            with self._requests.errors("GET", whole, _PROXY_SECONDS):
                return response.status, response.data.decode(errors="replace")
        except ApiError as refused:
            if refused.sent_by_api:
                raise
            return refused.status, refused.message

    @contextmanager
    def exec(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[ExecProcess]:
        """Run a command in a container."""
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url
        from websocket import WebSocketBadStatusException, WebSocketException

        from clickline.deploy.api_requests import reason

        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
        query = [("container", container), *(("command", word) for word in command)]
        query += [(stream, "true") for stream in ("stdin", "stdout", "stderr")]
        api = self._requests.client
        _, url, headers, *_ = api.param_serialize(
            "GET", path, query_params=query, header_params={}, auth_settings=["BearerToken"]
        )
        try:
            address = get_websocket_url(url)  # type: ignore[no-untyped-call]
            socket = create_websocket(api.configuration, address, headers)  # type: ignore[no-untyped-call]
        except WebSocketBadStatusException as error:
            body = error.resp_body or b""
            raise self._requests.api_error(error.status_code, body, "EXEC", path) from error
        except (WebSocketException, OSError) as error:
            raise ClusterError(
                f"{self.host} ({self.where}) cannot be reached: {reason(error)}. Try again."
            ) from error
        process = ExecProcess(socket)
        try:
            yield process
        finally:
            process.close()
