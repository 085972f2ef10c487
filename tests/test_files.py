"""Names of files, and how they are written."""

from pathlib import Path

from ag.files import file_names, replacing


def test_a_name_that_is_taken_gets_the_next_free_number() -> None:
    assert file_names(["a", "a", "a_2", "a", "a/b", "a b"]) == ["a", "a_2", "a_2_2", "a_3", "a_b", "a_b_2"]


def test_two_writers_of_one_file_have_different_paths(tmp_path: Path) -> None:
    """Even with one process number, which processes of two containers may share."""
    target = tmp_path / "x"
    with replacing(target) as first:
        first.write_text("first")
        with replacing(target) as second:
            second.write_text("second")
        assert target.read_text() == "second"
    assert target.read_text() == "first"
    assert [*tmp_path.iterdir()] == [target]
    assert first.suffix == second.suffix == ".partial"  # RunCheckpoint removes those of a killed run
