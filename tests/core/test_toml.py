"""A document knows on which line each of its keys stands."""

from hypothesis import given
from hypothesis import strategies as st

from cairn.core.toml import read, render_value


def where(tmp_path, text: str, key: str) -> str:
    path = tmp_path / "a.toml"
    path.write_text(text)
    return read(path).where(key).removeprefix(str(path)).strip()


def test_keys_and_tables_have_lines(tmp_path):
    text = 'a = 1\n\n# b = 0\nb = """\na = 2\n[c]\n"""\n[c]  # a table\n"d" = 3\n[c.e]\n  f = 4\n'
    assert where(tmp_path, text, "a") == "line 1"
    assert where(tmp_path, text, "b") == "line 4"
    assert where(tmp_path, text, "c") == "line 8"
    assert where(tmp_path, text, "c.d") == "line 9"
    assert where(tmp_path, text, "c.e.f") == "line 11"


def test_only_a_newline_ends_a_line(tmp_path):
    assert where(tmp_path, "a = '\x85\u2028'\r\nb = 2\r\n", "b") == "line 2"


def test_a_key_without_a_line_of_its_own_has_that_of_its_table(tmp_path):
    text = "x = 1\na = { b = { c = 2 } }\nd.e = 1\n"
    assert where(tmp_path, text, "a.b.c") == "line 2"
    assert where(tmp_path, text, "d.e") == "line 3"
    assert where(tmp_path, text, "absent") == ""


@given(
    st.recursive(
        st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(st.characters(codec="utf-8")),
        lambda item: st.lists(item, max_size=3),
    )
)
def test_a_rendered_value_reads_back(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("value") / "a.toml"
    text = f"key = {render_value(value)}\n"
    path.write_bytes(text.encode())
    assert read(path).values == {"key": value}
    assert text.count("\n") == 1
