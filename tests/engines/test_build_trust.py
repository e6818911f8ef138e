"""When a build of llama.cpp that crashed engines is given up: for everybody, for one model, or not at all."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from engines import build_trust
from engines.build_trust import Fault, blame, excuse, prove, read
from engines.native_library import choose
from tests.engines.test_native_library import PACKAGE, put


def fault(model: str, number: int, at: datetime | None = None) -> Fault:
    moment = (at or datetime.now(UTC)).isoformat(timespec="seconds")
    return Fault(moment, "SIGSEGV", "7", model, f"{number} 1.0", "Fatal Python error: Segmentation fault")


def two_builds(home: Path, arch: str = "cpu") -> tuple[Path, Path]:
    """An older and a newer one's folders."""
    old = put(home, "old", (arch,), "2026-11-01T00:00:00+00:00")
    return old.parent, put(home, "new", (arch,), "2026-11-02T00:00:00+00:00").parent


def chosen(home: Path, model: str, arch: str = "cpu") -> str | None:
    build = choose(home, arch, PACKAGE, model)
    return build.folder.name if build else None


def test_two_faults_give_a_build_up_for_the_one_before_it_and_then_for_the_bindings_own(tmp_path: Path) -> None:
    old, new = two_builds(tmp_path)
    assert not blame(new, fault("a", 1)).is_marked
    assert chosen(tmp_path, "a") == "new"
    assert not blame(new, fault("a", 1)).is_marked, "seen twice, it is one crash"
    assert blame(new, fault("b", 2)).is_distrusted
    assert [chosen(tmp_path, model) for model in ("a", "b", "c", "")] == ["old"] * 4
    for number in (3, 4):
        blame(old, fault("a", number))
    assert chosen(tmp_path, "a") is None
    assert "2 native faults, the last SIGSEGV at 20" in read(new).told()


def test_what_other_models_came_up_with_is_given_up_for_the_one_that_it_crashes(tmp_path: Path) -> None:
    _, new = two_builds(tmp_path)
    prove(new, "b")
    for number in (1, 2):
        blame(new, fault("a", number))
    assert (chosen(tmp_path, "a"), chosen(tmp_path, "b"), chosen(tmp_path, "c")) == ("old", "new", "new")
    blame(new, fault("b", 3))
    assert chosen(tmp_path, "c") == "old", "who crashed proves nothing"


def test_a_model_that_crashes_every_library_speaks_against_none(tmp_path: Path) -> None:
    _, new = two_builds(tmp_path)
    for number in (1, 2):
        blame(new, fault("a", number))
    assert chosen(tmp_path, "b") == "old"
    excuse(new, "a")
    assert (chosen(tmp_path, "a"), chosen(tmp_path, "b")) == ("old", "new")


def test_a_card_has_nothing_to_fall_back_on_so_another_model_is_tried(tmp_path: Path) -> None:
    folder = put(tmp_path, "only", ("sm_86",), "2026-11-02T00:00:00+00:00").parent
    for number in (1, 2):
        blame(folder, fault("a", number))
    assert (chosen(tmp_path, "a", "sm_86"), chosen(tmp_path, "b", "sm_86")) == (None, "only")
    prove(folder, "b")
    assert not read(folder).is_distrusted


def test_faults_that_are_far_apart_do_not_add_up(tmp_path: Path) -> None:
    _, new = two_builds(tmp_path)
    blame(new, fault("a", 1, datetime.now(UTC) - build_trust.FAULTS_WITHIN - timedelta(minutes=1)))
    assert not blame(new, fault("a", 2)).is_marked
    assert blame(new, fault("a", 3)).is_marked


def test_a_record_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"faults": [{"at": 1}], "proven_by": []}', '{"faults": 3, "proven_by": []}'):
        (tmp_path / build_trust.RECORD).write_text(text)
        assert read(tmp_path) == build_trust.Trust()
