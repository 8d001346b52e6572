"""A checkpoint goes to a repository with its card, with a token only, and a token is never told."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pipeline.cli import main
from pipeline.errors import PrerequisiteError, StageError, UsageError
from pipeline.hub_upload import hub_token, upload_checkpoint

TOKEN = "hf_" + "x" * 30


class Hub(BaseHTTPRequestHandler):
    """What the Hub answers to a new repository and to a commit of small files."""

    files: ClassVar[dict[str, bytes]] = {}
    repositories: ClassVar[list[dict[str, Any]]] = []
    tokens: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.tokens.add(self.headers.get("Authorization", ""))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            self.repositories.append(asked)
            self.answer({"url": f"{self.address}/me/tiny-int8"})
        elif self.path.endswith("/preupload/main"):
            modes = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self.answer({"files": modes})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{self.address}/me/tiny-int8/commit/1", "commitOid": "1" * 40})
        else:
            self.answer({"warnings": [], "errors": []})

    @property
    def address(self) -> str:
        return f"http://{self.headers['Host']}"

    def answer(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Denying(Hub):
    """A Hub that takes nothing from this token."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({"error": f"the token {TOKEN} may not write"}, status=403)


@pytest.fixture(params=[Hub])
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield request.param
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("README.md", "model.safetensors", "manifest.json", ".lock"):
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    return tmp_path


def test_every_file_but_hidden_ones_arrives_in_a_private_repository(hub: type[Hub], folder: Path) -> None:
    url = upload_checkpoint(folder, repository="me/tiny-int8", message="version 1: ship")
    assert url.endswith("/me/tiny-int8/commit/1")
    assert {name: text.decode() for name, text in hub.files.items()} == {
        name: f"text of {name}" for name in ("README.md", "model.safetensors", "manifest.json")
    }
    (made,) = hub.repositories
    assert (made["name"], made["organization"]) == ("tiny-int8", "me")
    assert made.get("private", made.get("visibility") == "private") is True
    assert hub.tokens == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("hub", [Denying], indirect=True)
def test_what_the_hub_refuses_is_told_without_the_token(hub: type[Hub], folder: Path) -> None:
    del hub
    with pytest.raises(StageError, match="not pushed to me/tiny-int8") as refused:
        upload_checkpoint(folder, repository="me/tiny-int8", message="version 1")
    assert TOKEN not in str(refused.value)


def test_a_push_needs_a_token_and_a_repositorys_name_before_anything_is_registered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(PrerequisiteError, match="HF_TOKEN isn't set"):
        hub_token("me/tiny-int8")
    with pytest.raises(UsageError, match="OWNER/NAME"):
        hub_token("tiny-int8")
    assert main(["promote", str(tmp_path), "int8", "--push", "me/tiny-int8"]) == 3
