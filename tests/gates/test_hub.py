"""Exports on the hub: what is sent, what comes back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

import ag
from ag.gates import export, folder
from ag.gates.export import ExportError
from ag.gates.gate import AttentionGates
from tests.support.exports import assert_same, make_gates
from tests.support.refused import refuses


def test_push_uploads_the_export_alone_and_keeps_it_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, path = Mock(), tmp_path / "export"
    hub.upload_folder.return_value = "https://hub/me/gates"
    monkeypatch.setattr(export, "HfApi", lambda: hub)
    export.save(path, make_gates())
    (path / "secret.txt").write_text("not part of the export")
    assert export.push(path, "me/gates") == "https://hub/me/gates"
    hub.create_repo.assert_called_once_with("me/gates", private=True, exist_ok=True)
    sent = ["gates.safetensors", "gate_config.json", "README.md", "figure.png"]
    hub.upload_folder.assert_called_once_with(repo_id="me/gates", folder_path=str(path), allow_patterns=sent)
    hub.create_repo.side_effect = OSError("no login")
    with refuses(ExportError, "push_to_hub=me/gates", "no login", "hf auth login"):
        export.push(path, "me/gates")
    (path / "gates.safetensors").write_bytes(b"")  # a damaged one is not sent
    with refuses(ExportError, "gates.safetensors", "sha256"):
        export.push(path, "me/gates")
    assert hub.create_repo.call_count == 2


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
        if repository != "me/gates" or revision not in (None, "refs/pr/1"):
            raise OSError("404: not found")
        return str(snapshot)

    folder.download.cache_clear()
    monkeypatch.setattr(folder, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize(("text", "revision"), [("me/gates", None), ("me/gates:refs/pr/1", "refs/pr/1")])
def test_exports_of_the_hub(shared: list[tuple[str, str | None]], text: str, revision: str | None) -> None:
    policy = ag.policy(f"mine=gates:{text}@heads", 0.5)
    assert str(policy.spec) == f"gates:{text}@heads" and policy.gates is not None
    for gates in (AttentionGates.from_pretrained(text), policy.gates):
        assert_same(gates, make_gates())
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
