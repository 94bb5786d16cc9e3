"""Each stage's own notes lead back to the source, and the page shows all of them."""

import json
import re
import subprocess
from html.parser import HTMLParser

import bad_kernels
import pytest
from browser import chromium

from cairn.kernels.tooling import explain, source_lines
from cairn.kernels.tooling.compile import compile_variant
from cairn.kernels.tooling.compiled import STAGES, Compiled
from cairn.kernels.tooling.lint import lint

MLIR = """#loc = loc("/k.py":1:0)
module {
  %0 = arith.constant 1 : i32 loc(#loc2)
  %1 = tt.call @f loc(#loc4)
  tt.return loc("/k.py":9:4)
} loc(#loc)
#loc1 = loc("/k.py":7:2)
#loc2 = loc("x"(#loc1))
#loc3 = loc("/lib.py":3:0)
#loc4 = loc(callsite(#loc3 at #loc1))
"""

LLVM = """define void @k() !dbg !4 {
  %1 = add i32 1, 2, !dbg !7
  ret void, !dbg !8
}
!1 = !DIFile(filename: "k.py", directory: "/d")
!2 = !DIFile(filename: "lib.py", directory: "/l")
!4 = distinct !DISubprogram(name: "k", file: !1, line: 5)
!5 = distinct !DISubprogram(name: "f", file: !2, line: 1)
!7 = !DILocation(line: 7, column: 23, scope: !4)
!8 = !DILocation(line: 3, column: 1, scope: !5, inlinedAt: !7)
"""

PTX = """.visible .entry k(
\t.file\t1 "/d" "k.py"
\t.file\t2 "/l/lib.py"
\t.loc\t1 7 23
\tadd.s32 %r1, %r2, 1;
\t.loc\t2 3 1, function_name $L__info_string0, inlined_at 1 9 4
$L__BB0_1:
\tret;
\t.section\t.debug_abbrev
\t.b8 1
"""

SASS = """
\t.section\t.text.k
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/l/lib.py", line 3 inlined at "/k.py", line 7
\t//## File "/k.py", line 7
        /*0010*/                   IADD3 R1, R1, 1, RZ ;
.L_x_1:
\t//## File "/k.py", line 9
        /*0020*/                   EXIT ;
"""


def places(reader, text: str) -> dict[str, list]:
    return {line.strip(): list(where) for line, where in reader(text)}


def test_mlir():
    found = places(source_lines.mlir, MLIR)
    assert found["%0 = arith.constant 1 : i32"] == [("/k.py", 7)]
    assert found["%1 = tt.call @f"] == [("/lib.py", 3), ("/k.py", 7)]
    assert found["tt.return"] == [("/k.py", 9)]
    assert not any("loc" in line for line in found)


def test_mlir_that_refers_to_itself_ends():
    assert list(source_lines.mlir('#loc1 = loc("x"(#loc1))\nop loc(#loc1)')) == [("op", [])]


def test_llvm():
    found = places(source_lines.llvm, LLVM)
    assert found["%1 = add i32 1, 2"] == [("/d/k.py", 7)]
    assert found["ret void"] == [("/l/lib.py", 3), ("/d/k.py", 7)]
    assert not any(line.startswith("!") for line in found)


def test_ptx():
    found = places(source_lines.ptx, PTX)
    assert found["add.s32 %r1, %r2, 1;"] == [("/d/k.py", 7)]
    assert found["ret;"] == [("/l/lib.py", 3), ("/d/k.py", 9)]
    assert found["$L__BB0_1:"] == []
    assert ".b8 1" not in found


def test_sass():
    found = places(source_lines.sass, SASS)
    assert found["/*0000*/ LDC R1, c[0x0][0x28] ;"] == []
    assert found["/*0010*/ IADD3 R1, R1, 1, RZ ;"] == [("/l/lib.py", 3), ("/k.py", 7), ("/k.py", 7)]
    assert found["/*0020*/ EXIT ;"] == [("/k.py", 9)]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile_variant(bad_kernels.GOOD, "matmul")


@pytest.fixture(scope="module")
def page(compiled: Compiled) -> str:
    return explain.render(compiled, lint(compiled), ["<another> variant"])


class Outline(HTMLParser):
    """Checks that what is opened is closed, and collects the text of each stage."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.stages: dict[str, str] = {}
        self.attributes: list[tuple[str, str]] = []
        self.stage = ""

    def handle_starttag(self, tag, attrs):
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        self.stage = dict(attrs).get("data-stage", self.stage) or ""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.stage = "" if tag == "details" else self.stage

    def handle_data(self, data):
        if self.stage and self.open[-1] == "pre":
            self.stages[self.stage] = self.stages.get(self.stage, "") + data


def test_the_page_is_well_formed_and_has_every_stage(page):
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    assert set(outline.stages) == set(STAGES)
    assert all(len(text.splitlines()) > 10 for text in outline.stages.values())
    assert "HGMMA" in outline.stages["sass"]
    assert "wgmma.mma_async" in outline.stages["ptx"]
    assert "def by_pointers" in outline.stages["source"]


def test_the_page_needs_nothing_but_itself(page):
    outline = Outline()
    outline.feed(page)
    assert not [value for name, value in outline.attributes if name in ("src", "href")]
    assert "url(" not in page.partition("</style>")[0]
    assert "import(" not in page
    assert "&lt;another&gt; variant" in page


def test_lines_of_the_dot_are_found_in_every_stage(page, compiled):
    maps = json.loads(re.search(r'id="lines">(.*?)</script>', page)[1])
    source = compiled.sources[0].text.splitlines()
    row = 2 + next(i for i, line in enumerate(source) if "total = tl.dot" in line)
    assert row in maps["source"]
    for stage in STAGES[1:]:
        assert row in maps[stage], stage


def test_the_summary_says_what_it_takes(compiled):
    text = explain.summary(compiled, lint(compiled))
    for words in ("registers per thread", "occupancy", "tensor core", "HGMMA", "findings\n  none"):
        assert words in text


def test_a_kernel_that_does_not_compile_has_a_page_with_the_reason():
    broken = compile_variant(bad_kernels.BROKEN, "broken")
    text = explain.render(broken, lint(broken))
    assert "incompatible dimensions" in text
    assert "incompatible dimensions" in explain.summary(broken, lint(broken))


def test_the_page_works_in_a_browser(page, tmp_path):
    file = tmp_path / "page.html"
    # Opens every stage, then clicks the first line of SASS that came from the source.
    click = """<script>
    for (const stage of document.querySelectorAll("details")) stage.open = true;
    setTimeout(() => document.querySelector("details[data-stage=sass] span[data-row]").click(), 300);
    setTimeout(() => { document.title = String(document.querySelectorAll(".lit").length); }, 600);
    </script></body>"""
    file.write_text(page.replace("</body>", click))
    done = subprocess.run(
        [chromium(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=5000", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    ready = dict(re.findall(r'data-stage="(\w+)"[^>]*data-ready="(\d+) of \d+"', done.stdout))
    assert set(ready) == set(STAGES), done.stderr[-2000:]
    assert all(int(count) > 5 for count in ready.values()), ready
    assert int(re.search(r"<title>(\d+)</title>", done.stdout)[1]) > 5
