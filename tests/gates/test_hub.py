"""Exports on the hub: what is sent, what comes back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ag
from ag.gates import export, folder
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from tests.support.exports import make_gates
from tests.support.refused import refuses


class Hub:
    """Stands for the hub: takes repositories and folders, or refuses."""

    calls: list[tuple[str, dict[str, Any]]] = []
    refusal: Exception | None = None

    def create_repo(self, repository: str, **options: Any) -> None:
        if self.refusal:
            raise self.refusal
        self.calls.append((repository, options))

    def upload_folder(self, **options: Any) -> str:
        self.calls.append((options["repo_id"], options))
        return f"https://hub/{options['repo_id']}"


def test_push_uploads_the_export_alone_and_keeps_it_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    path = tmp_path / "export"
    export.save(path, make_gates())
    (path / "secret.txt").write_text("not part of the export")
    assert export.push(path, "me/gates") == "https://hub/me/gates"
    [(_, made), (name, upload)] = Hub.calls
    assert made == {"private": True, "exist_ok": True} and name == "me/gates"
    assert upload["allow_patterns"] == ["gates.safetensors", "gate_config.json", "README.md", "figure.png"]
    monkeypatch.setattr(Hub, "refusal", OSError("no login"))
    with refuses(ExportError, "push_to_hub=me/gates", "no login", "hf auth login"):
        export.push(path, "me/gates")


def test_push_of_a_damaged_export_uploads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "HfApi", lambda: pytest.fail("the hub was asked"))
    export.save(tmp_path / "export", make_gates())
    (tmp_path / "export" / "gates.safetensors").write_bytes(b"")
    with pytest.raises(ExportError):
        export.push(tmp_path / "export", "me/gates")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The hub has me/gates, kept as its cache keeps it: links to blobs. Returns what was asked for."""
    export.save(tmp_path / "export", make_gates(), base_model="tiny")
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate((tmp_path / "export").iterdir()):
        (blobs / f"{number}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision))
        assert {"gates.safetensors", "gate_config.json", "adapter/*"} <= set(allow_patterns)
        if repository != "me/gates" or revision not in (None, "v1", "refs/pr/1"):
            raise OSError("404: not found")
        return str(snapshot)

    folder.download.cache_clear()
    monkeypatch.setattr(folder, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize(
    ("text", "revision"), [("me/gates", None), ("me/gates:v1", "v1"), ("me/gates:refs/pr/1", "refs/pr/1")]
)
def test_exports_of_the_hub(shared: list[tuple[str, str | None]], text: str, revision: str | None) -> None:
    ours = make_gates().state_dict()
    for gates in (
        AttentionGates.from_pretrained(text),
        ag.policy(f"gates:{text}").gates,
        ag.policy(f"mine=gates:{text}@heads", 0.5).gates,
    ):
        assert gates is not None
        theirs = gates.state_dict()
        assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    assert str(ag.policy(f"mine=gates:{text}@heads", 0.5).spec) == f"gates:{text}@heads"
    assert export.read_info(text)["base_model"]["name"] == "tiny"
    assert export.adapter_path(text) is None and len(export.adapter_checksum(text)) == 64
    assert shared == [("me/gates", revision)]  # once, whatever asks


def test_exports_that_the_hub_has_not(shared: list[tuple[str, str | None]], tmp_path: Path) -> None:
    for text, parts in (("me/gate", "me/gate 404"), ("me/gates:v2", "me/gates v2 404")):
        with refuses(ExportError, *parts.split(), "ORG/NAME:REVISION"):
            ag.policy(f"gates:{text}")
    asked = len(shared)
    (tmp_path / "runs").mkdir()
    for text in ("runs/gates", "gates", "a/b/c", f"{tmp_path}/gates"):  # folders that are not there
        with refuses(ExportError, "no such folder"):
            ag.policy(f"gates:{text}")
    (tmp_path / "me").mkdir()
    (tmp_path / "export").rename(tmp_path / "me" / "gates")
    assert ag.policy("gates:me/gates").gates is not None  # a folder comes first
    assert len(shared) == asked


def test_links_out_of_the_hubs_cache_are_refused(shared: list[tuple[str, str | None]], tmp_path: Path) -> None:
    file = tmp_path / "cache" / "snapshots" / "abc" / "gates.safetensors"
    (tmp_path / "elsewhere").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with refuses(ExportError, "gates.safetensors", "link", str(tmp_path / "elsewhere")):
        AttentionGates.from_pretrained("me/gates")
