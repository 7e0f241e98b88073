"""A small Hugging Face Hub on 127.0.0.1, so that tests run the real ``huggingface_hub`` client with no mock.

    with HubServer() as hub:
        hub.commit("org/model", {"config.json": b"{}"})
        subprocess.run([sys.executable, "-c", code], env=hub_env(hub, tmp_path), check=True)  # another process
        point_client_at(monkeypatch, hub, tmp_path)  # or this process

Model repositories only, kept in memory. As on the Hub, a repository that the token may not see looks like a missing
one (401 with no token, 404 with another one), only the files of a gated repository are closed (401 and 403), and every
write needs some token. Unlike the Hub, a new repository holds no ``.gitattributes``, files are served directly rather
than through a redirect to a storage host, any YAML is valid, LFS files are uploaded in one part, and a listing has one
page.

Xet: downloads never offer it, and huggingface_hub 1.0 asks the LFS batch call, which answers "basic". But later ones
(1.33, 2.4) upload LFS files through Xet where ``hf_xet`` is installed, whatever the server says: both helpers below
switch it off."""

import base64
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import RLock, Thread
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

# What the server speaks: method (GET also answers HEAD), path, name of the `HubServer` method.
ROUTES = [
    ("GET", "/{repo}/resolve/{rev}/{path}", "_download"),
    ("GET", "/api/models/{repo}/revision/{rev}", "_model_info"),
    ("GET", "/api/models/{repo}/tree/{rev}", "_tree"),
    ("GET", "/api/models/{repo}/tree/{rev}/{path}", "_tree"),
    ("GET", "/api/models/{repo}", "_model_info"),
    ("GET", "/api/whoami-v2", "_whoami"),
    ("POST", "/api/validate-yaml", "_validate_yaml"),
    ("POST", "/api/repos/create", "_create_repo"),
    ("POST", "/api/models/{repo}/branch/{rev}", "_create_branch"),
    ("POST", "/api/models/{repo}/preupload/{rev}", "_preupload"),
    ("POST", "/{repo}.git/info/lfs/objects/batch", "_lfs_batch"),
    ("PUT", "/lfs/{oid}", "_lfs_put"),
    ("POST", "/api/models/{repo}/commit/{rev}", "_commit"),
]
FIELDS = {"repo": r"[\w.-]+(?:/[\w.-]+)?", "rev": r"[^/]+", "path": ".+", "oid": "[0-9a-f]{64}"}
PATTERNS = [
    (method, re.compile(re.sub(r"\\{(\w+)\\}", lambda m: f"(?P<{m[1]}>{FIELDS[m[1]]})", re.escape(path))), name)
    for method, path, name in ROUTES
]
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")
LFS_SIZE = 10_000_000  # larger files are LFS files whatever their name


def is_lfs(path: str, size: int) -> bool:
    return path.endswith(LFS_SUFFIXES) or size > LFS_SIZE


class Blob:
    def __init__(self, data: bytes, lfs: bool) -> None:
        self.data, self.lfs = data, lfs
        self.sha256 = hashlib.sha256(data).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(data)}\n".encode()
        stored = pointer if lfs else data
        self.oid = hashlib.sha1(b"blob %d\0" % len(stored) + stored, usedforsecurity=False).hexdigest()
        self.etag = self.sha256 if lfs else self.oid
        self.row: dict[str, Any] = {"size": len(data), "oid": self.oid}  # as in listings
        if lfs:
            size = {"size": len(data), "pointerSize": len(pointer)}
            self.row["lfs"] = {"oid": self.sha256, "sha256": self.sha256, **size}


@dataclass(frozen=True)
class Commit:
    oid: str
    files: dict[str, Blob]
    date: str


@dataclass
class Repo:
    id: str
    refs: dict[str, Commit] = field(default_factory=dict)  # by full name: refs/heads/main, refs/tags/v1
    commits: dict[str, Commit] = field(default_factory=dict)
    private_token: str | None = None
    gated: bool = False
    gate_token: str | None = None

    def at(self, revision: str) -> Commit:
        refs = self.refs
        found = refs.get(f"refs/heads/{revision}") or refs.get(f"refs/tags/{revision}") or self.commits.get(revision)
        if not found:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def add(self, branch: str, files: dict[str, Blob], message: str) -> Commit:
        tree = {path: blob.oid for path, blob in sorted(files.items())}
        content = json.dumps([self.id, list(self.commits), message, tree]).encode()
        oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        commit = Commit(oid, files, time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()))
        self.refs[f"refs/heads/{branch}"] = self.commits[oid] = commit
        return commit


class HubError(Exception):
    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        named = {"X-Error-Code": code} if code else {}
        self.reply = Reply(status, {"error": message}, {"X-Error-Message": message, **named, **headers})


@dataclass
class Request:
    url: dict[str, str]  # the fields of the route
    query: dict[str, str]
    token: str
    body: bytes

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("1", "true")


@dataclass
class Reply:
    status: int
    body: Any  # bytes, or what JSON can hold
    headers: Mapping[str, str] = field(default_factory=dict)


class HubServer:
    def __init__(self, user: str = "tester") -> None:
        self.user = user
        self.requests: list[tuple[str, str, int]] = []  # (method, path as sent without its query, status)
        self._repos: dict[str, Repo] = {}
        self._objects: dict[str, bytes] = {}  # LFS objects by sha256
        self._lock = RLock()
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    # --- for the tests: seed and look at repositories ---

    def commit(
        self, repo_id: str, files: Mapping[str, bytes | None], revision: str = "main", message: str = "commit"
    ) -> str:
        """Write `files` (None deletes) on top of a branch, made (from main) if needed; return the commit hash."""
        with self._lock:
            repo = self._repos.get(repo_id) or self._new_repo(repo_id)
            parent = repo.refs.get(f"refs/heads/{revision}") or repo.at("main")
            kept = {path: blob for path, blob in parent.files.items() if path not in files}
            blobs = {p: Blob(data, is_lfs(p, len(data))) for p, data in files.items() if data is not None}
            self._objects.update({blob.sha256: blob.data for blob in blobs.values() if blob.lfs})
            return repo.add(revision, {**kept, **blobs}, message).oid

    def tag(self, repo_id: str, tag: str, revision: str = "main") -> None:
        self._repos[repo_id].refs[f"refs/tags/{tag}"] = self._repos[repo_id].at(revision)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.data for path, blob in self._repos[repo_id].at(revision).files.items()}

    def lfs_files(self, repo_id: str, revision: str = "main") -> set[str]:
        return {path for path, blob in self._repos[repo_id].at(revision).files.items() if blob.lfs}

    def private(self, repo_id: str, token: str) -> None:
        """Hide a repository from every other token."""
        self._repos[repo_id].private_token = token

    def gate(self, repo_id: str, token: str | None = None) -> None:
        """Close a repository's files to every other token (to all with no `token`)."""
        self._repos[repo_id].gated, self._repos[repo_id].gate_token = True, token

    # --- the protocol ---

    def answer(self, method: str, path: str, request: Request) -> Reply:
        for route_method, pattern, name in PATTERNS:
            if route_method == method and (match := pattern.fullmatch(path)):
                request.url = {key: unquote(value) for key, value in match.groupdict().items()}
                try:
                    with self._lock:
                        reply = getattr(self, name)(request)
                except HubError as error:
                    return error.reply
                return reply if isinstance(reply, Reply) else Reply(200, reply)
        return Reply(404, {"error": f"support.runs.hub_server.py has no route for {method} {path}"})

    def _new_repo(self, repo_id: str) -> Repo:
        repo = self._repos[repo_id] = Repo(repo_id)
        repo.add("main", {}, "initial commit")
        return repo

    def _repo(self, request: Request, write: bool = False) -> Repo:
        repo = self._repos.get(request.url["repo"])
        hidden = repo is None or repo.private_token not in (None, request.token)
        if repo is None or hidden or (write and not request.token):
            raise HubError(404 if request.token else 401, "RepoNotFound", "Repository not found")
        return repo

    def _download(self, request: Request) -> Reply:
        repo, path = self._repo(request), request.url["path"]
        if repo.gated and (not request.token or request.token != repo.gate_token):
            raise HubError(403 if request.token else 401, "GatedRepo", f"Access to model {repo.id} is restricted.")
        commit = repo.at(request.url["rev"])
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            raise HubError(404, "EntryNotFound", "Entry not found", **headers)
        blob = commit.files[path]
        headers["ETag"] = f'"{blob.etag}"'
        if blob.lfs:
            headers |= {"X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": str(len(blob.data))}
        return Reply(200, blob.data, headers)

    def _model_info(self, request: Request) -> dict[str, Any]:
        repo = self._repo(request)
        commit = repo.at(request.url.get("rev", "main"))
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        info = {"_id": repo.id, "id": repo.id, "modelId": repo.id, "author": repo.id.split("/")[0], "sha": commit.oid}
        status = {"private": repo.private_token is not None, "gated": "manual" if repo.gated else False}
        counts = {"disabled": False, "downloads": 0, "likes": 0, "tags": [], "lastModified": commit.date}
        return {**info, **status, **counts, "siblings": siblings}

    def _tree(self, request: Request) -> list[dict[str, Any]]:
        everything = entries(self._repo(request).at(request.url["rev"]).files)
        folder = request.url.get("path", "").strip("/")
        if folder and everything.get(folder, {}).get("type") != "directory":
            raise HubError(404, "EntryNotFound", f"{folder} does not exist on {request.url['rev']}")
        prefix = f"{folder}/" if folder else ""
        inside = [entry for path, entry in everything.items() if path.startswith(prefix)]
        return [entry for entry in inside if request.flag("recursive") or "/" not in entry["path"][len(prefix) :]]

    def _whoami(self, request: Request) -> dict[str, Any]:
        if not request.token:
            raise HubError(401, "", "Invalid username or password.")
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        return {"type": "user", "id": self.user, "name": self.user, "fullname": self.user, "orgs": [], "auth": auth}

    def _validate_yaml(self, request: Request) -> dict[str, Any]:
        return {"errors": [], "warnings": []}

    def _create_repo(self, request: Request) -> Reply:
        if not request.token:
            raise HubError(401, "", "Invalid username or password.")
        asked = json.loads(request.body)
        repo_id = f"{asked.get('organization') or self.user}/{asked['name']}"
        created = {"url": f"{self.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self._repos:
            return Reply(409, {**created, "error": "You already created this model repo"})
        repo = self._new_repo(repo_id)
        if asked.get("visibility") == "private" or asked.get("private"):
            repo.private_token = request.token
        return Reply(200, created)

    def _create_branch(self, request: Request) -> dict[str, Any]:
        ref, repo = f"refs/heads/{request.url['rev']}", self._repo(request, write=True)
        repo.refs[ref] = repo.at("main")
        return {"ref": ref}

    def _preupload(self, request: Request) -> dict[str, Any]:
        present, answers = self._repo(request, write=True).at(request.url["rev"]).files, []
        for file in json.loads(request.body)["files"]:
            path, mode = file["path"], "lfs" if is_lfs(file["path"], file["size"]) else "regular"
            oid = present[path].etag if path in present else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def _lfs_batch(self, request: Request) -> dict[str, Any]:
        self._repo(request, write=True)
        objects = []
        for entry in json.loads(request.body)["objects"]:
            oid, size = entry["oid"], entry["size"]
            actions = {"upload": {"href": f"{self.endpoint}/lfs/{oid}"}}
            objects.append({"oid": oid, "size": size, **({} if oid in self._objects else {"actions": actions})})
        return {"transfer": "basic", "objects": objects}

    def _lfs_put(self, request: Request) -> dict[str, Any]:
        if hashlib.sha256(request.body).hexdigest() != request.url["oid"]:
            raise HubError(400, "", "The content's sha256 is not the object's name")
        self._objects[request.url["oid"]] = request.body
        return {}

    def _commit(self, request: Request) -> dict[str, Any]:
        repo, revision = self._repo(request, write=True), request.url["rev"]
        parent = repo.at(revision)
        if f"refs/heads/{revision}" not in repo.refs or request.flag("create_pr"):
            raise HubError(400, "", "support.runs.hub_server.py commits to branches only")
        files, message = dict(parent.files), ""
        for line in request.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            path = value.get("path", "").strip("/")
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[path] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile":
                if value["oid"] not in self._objects:
                    raise HubError(400, "", f"LFS object {value['oid']} of {path} was not uploaded")
                files[path] = Blob(self._objects[value["oid"]], lfs=True)
            elif key == "deletedFile":
                del files[path]
            else:
                raise HubError(400, "", f"Unknown operation {key}")
        commit = repo.add(revision, files, message)
        url = f"{self.endpoint}/{repo.id}/commit/{commit.oid}"
        return {"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""}


def entries(files: Mapping[str, Blob]) -> dict[str, dict[str, Any]]:
    """What the tree and paths-info calls say of each file and folder, by path."""
    rows = {path: {"type": "file", "path": path, **blob.row} for path, blob in files.items()}
    for folder in {str(parent) for path in files for parent in Path(path).parents} - {"."}:
        oid = hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()
        rows[folder] = {"type": "directory", "path": folder, "oid": oid, "size": 0}
    return dict(sorted(rows.items()))


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # snapshot_download opens many connections at once


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: HubServer, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def _serve(self) -> None:
        url = urlsplit(self.path)
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        token = token if scheme.lower() == "bearer" else ""
        request = Request({}, dict(parse_qsl(url.query)), token, self._body())
        reply = self.hub.answer("GET" if self.command == "HEAD" else self.command, url.path, request)
        is_json = not isinstance(reply.body, bytes)
        content = json.dumps(reply.body).encode() if is_json else reply.body
        self.hub.requests.append((self.command, url.path, reply.status))
        self.send_response(reply.status)
        sent = {"Content-Type": "application/json" if is_json else "application/octet-stream", **reply.headers}
        # Every connection is closed after its answer: none outlives the server, which tests stop to be offline.
        for key, value in {**sent, "Content-Length": str(len(content)), "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - names that http.server calls

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, *args: Any) -> None:
        """Stay silent: `HubServer.requests` is the log."""


# --- pointing the client at the server ---


def hub_env(hub: HubServer, cache_dir: Path | str, token: str | None = None, offline: bool = False) -> dict[str, str]:
    """The whole environment of a subprocess whose Hub is `hub` (no other HF_* setting is passed on)."""
    others = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    env |= {"HF_TOKEN": token} if token else {}
    return env | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(cache_dir),
        "HF_HUB_CACHE": str(Path(cache_dir) / "hub"),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers would ask a Space to convert a .bin
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def point_client_at(
    monkeypatch: pytest.MonkeyPatch,
    hub: HubServer,
    cache_dir: Path | str,
    token: str | None = None,
    offline: bool = False,
) -> None:
    """Point the ``huggingface_hub`` of this process at `hub`, until `monkeypatch` is undone.

    The client reads its environment once, at import: so besides the environment (for subprocesses, peft and the token)
    this replaces the constants wherever a module holds them, and the endpoint of the client objects made at import."""
    import huggingface_hub
    from huggingface_hub import hf_api
    from transformers.utils import hub as transformers_hub  # imported now, or it would keep what is set here

    env = hub_env(hub, cache_dir, token, offline)
    for key in os.environ.keys() - env.keys():
        monkeypatch.delenv(key)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    home = Path(cache_dir)
    values: dict[str, object] = {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HUGGINGFACE_HUB_CACHE": str(home / "hub"),
        "HF_MODULES_CACHE": str(home / "modules"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "AGENT_HARNESSES_PATH": str(home / ".agent_harnesses.json"),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DISABLE_PROGRESS_BARS": True,
    }
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.split(".")[0] in ("huggingface_hub", "transformers", "peft"):
            for key in values.keys() & vars(module).keys():
                monkeypatch.setattr(module, key, values[key])
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)  # behind huggingface_hub.model_info and so on
    monkeypatch.setattr(hf_api.api, "_whoami_cache", {}, raising=False)
    monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)  # made again at the next call
    huggingface_hub.close_session()  # the next request reads NO_PROXY
