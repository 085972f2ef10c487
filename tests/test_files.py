"""Names of files."""

from ag.files import file_names


def test_a_name_that_is_taken_gets_the_next_free_number() -> None:
    assert file_names(["a", "a", "a_2", "a", "a/b", "a b"]) == ["a", "a_2", "a_2_2", "a_3", "a_b", "a_b_2"]
