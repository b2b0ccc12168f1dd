"""The audit log, and warnings about wrong tokens that do not fill the terminal."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from manyhands.runtime import audit
from manyhands.runtime.audit import AuditLog, entries
from manyhands.runtime.failed_proofs import FailedProofs


def test_what_happened_can_be_read_again(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "home")
    log.record("joined", name="pi", origin="10.0.0.7")
    log.record("failed proof", origin="10.0.0.8", count=12)
    log.record("refused", reason="x" * 1000 + "\n")
    found = entries(tmp_path / "home")
    assert [one["event"] for one in found] == ["joined", "failed proof", "refused"]
    assert found[1]["count"] == 12
    assert len(str(found[2]["reason"])) == 300
    path = tmp_path / "home" / "audit.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(json.loads(line)["time"] for line in path.read_text().splitlines())


def test_it_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST_BYTES", 2000)
    log = AuditLog(tmp_path)
    for number in range(200):
        log.record("joined", number=number)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2100
    found = [one["number"] for one in entries(tmp_path)]
    assert found == list(range(found[0], 200))  # type: ignore[arg-type]
    assert len(found) > 20


def test_whatever_goes_wrong_with_it_ends_no_run(tmp_path: Path) -> None:
    AuditLog(None).record("joined")
    (tmp_path / "file").write_text("")
    AuditLog(tmp_path / "file").record("joined")
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "file")
    AuditLog(tmp_path).record("joined")
    assert (tmp_path / "file").read_text() == "", "a link is not followed"
    (tmp_path / "audit.1.jsonl").write_bytes(b'{"event": "a"}\n\xff\n[1]\n{"event": {}}\n' + b"[" * 10_000)
    (tmp_path / "audit.jsonl").unlink()
    assert entries(tmp_path) == [{"event": "a"}]


def test_the_first_wrong_token_is_told_at_once_and_others_by_number(tmp_path: Path) -> None:
    said: list[str] = []
    now = [0.0]
    failed = FailedProofs(said.append, AuditLog(tmp_path), lambda: now[0])
    for _ in range(5846):
        failed.note("10.0.0.7")
        failed.report()
    assert said == ["Warning: a wrong token came from 10.0.0.7. The sender was not let in."]
    now[0] = 61.0
    failed.report()
    assert said[1:] == ["Warning: 5845 wrong proofs of the token from 10.0.0.7 in the last minute."]
    failed.note("10.0.0.8")
    assert "10.0.0.8" in said[-1], "another address is told of at once"
    failed.note("10.0.0.8")
    failed.report(is_last=True)
    assert "1 wrong proof of the token from 10.0.0.8" in said[-1]
    assert [(one["origin"], one["count"]) for one in entries(tmp_path)] == [
        ("10.0.0.7", 1), ("10.0.0.7", 5845), ("10.0.0.8", 1), ("10.0.0.8", 1),
    ]  # fmt: skip


def test_many_addresses_do_not_fill_the_terminal(tmp_path: Path) -> None:
    said: list[str] = []
    now = [0.0]
    failed = FailedProofs(said.append, AuditLog(tmp_path), lambda: now[0])
    for number in range(1000):
        failed.note(f"10.0.{number // 250}.{number % 250}")
    now[0] = 61.0
    failed.report()
    assert len(said) == 8 + 8 + 1
    assert said[-1] == "Warning: 984 more from other addresses."
