"""Uploading an export: what is sent, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exports import make_gates
from refused import refuses

from ag.gates import export, hub
from ag.gates.export import ExportError


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
    monkeypatch.setattr(hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    path = tmp_path / "export"
    export.save(path, make_gates())
    (path / "secret.txt").write_text("not part of the export")
    assert hub.push(path, "me/gates") == "https://hub/me/gates"
    [(_, made), (name, upload)] = Hub.calls
    assert made == {"private": True, "exist_ok": True} and name == "me/gates"
    assert upload["allow_patterns"] == ["gates.safetensors", "gate_config.json", "README.md", "figure.png"]
    monkeypatch.setattr(Hub, "refusal", OSError("no login"))
    with refuses(ExportError, "push_to_hub=me/gates", "no login", "hf auth login"):
        hub.push(path, "me/gates")


def test_push_of_a_damaged_export_uploads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    export.save(tmp_path / "export", make_gates())
    (tmp_path / "export" / "gates.safetensors").write_bytes(b"")
    with pytest.raises(ExportError):
        hub.push(tmp_path / "export", "me/gates")
