"""Every stage of a compiled kernel side by side, and what it takes to run: for the terminal, and as one page.

In the page a line of the source lights up what became of it in each stage. Works on the facts of `compile`;
compiles nothing itself.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cairn.core.units import format_bytes
from cairn.kernels.tooling.compiled import STAGES, Compiled
from cairn.kernels.tooling.lint import Finding
from cairn.kernels.tooling.machine_code import SHARED_LIMIT, WARPS_PER_SM
from cairn.kernels.tooling.source_lines import READERS, Place
from cairn.report import page as html

TITLES = {
    "source": "Python",
    "ttir": "Triton IR",
    "ttgir": "Triton GPU IR",
    "llir": "LLVM IR",
    "ptx": "PTX",
    "sass": "SASS",
}
OPEN = ("source", "ttgir", "sass")  # what a page shows first
MEMORY = ("TMA", "asynchronous copy", "global memory", "shared memory", "local memory")


def resources(kernel: Compiled) -> dict[str, str]:
    """Describe the resources of a block, and how many blocks fit on a multiprocessor."""
    rows = {
        "registers per thread": str(kernel.registers),
        "warps per block": str(kernel.warps),
        "shared memory": f"{format_bytes(kernel.shared_bytes)} of {format_bytes(SHARED_LIMIT)}",
        "spilled": f"{kernel.spill_store_bytes} bytes",
        "stack": f"{kernel.stack_bytes} bytes",
    }
    room = kernel.occupancy
    if room is not None:
        blocks = f"{room.blocks} block{'s' if room.blocks != 1 else ''} per multiprocessor"
        rows["occupancy"] = f"{room.warps} of {WARPS_PER_SM} warps ({room.fraction:.0%}), {blocks}"
        rows["limited by"] = room.limit
    return rows


def accesses(kernel: Compiled) -> dict[str, int]:
    """Memory and tensor-core instructions with their widths: LDG.E.128 says that loads are vectors."""
    from cairn.kernels.tooling.machine_code import kind

    kinds = {*MEMORY, "tensor core"}
    return {opcode: count for opcode, count in kernel.opcodes.items() if kind(opcode) in kinds}


def summary(kernel: Compiled, findings: Sequence[Finding]) -> str:
    """A screen of text."""
    lines = [f"{kernel.kernel}: {kernel.variant}", f"compiled for sm_90a with {kernel.tools}", ""]
    if kernel.error is None:
        lines += [f"  {name:<21} {value}" for name, value in resources(kernel).items()]
        total = sum(kernel.stage_ms.values())
        steps = ", ".join(f"{stage} {ms:.0f}" for stage, ms in kernel.stage_ms.items())
        lines += ["", f"  compile time          {total:.0f} ms ({steps})"]
        lines += ["", "instructions in the machine code"]
        lines += [f"  {name:<21} {count}" for name, count in kernel.mix.items()]
        lines += ["", "memory and tensor-core instructions by width"]
        lines += [f"  {opcode:<32} {count}" for opcode, count in accesses(kernel).items()]
    lines += ["", "findings"]
    lines += [f"  {f.severity}: {f.message} ({f.rule})" for f in findings] or ["  none"]
    return "\n".join(lines)


def render(kernel: Compiled, findings: Sequence[Finding], others: Sequence[str] = ()) -> str:
    """The page: one HTML document with everything in it."""
    body = [
        html.paragraph(
            f"{kernel.variant}, compiled for sm_90a with {kernel.tools}, no GPU involved"
        ),
        *_verdict(findings),
    ]
    if kernel.error is None:
        body += [
            html.heading("What a block takes"),
            html.facts(resources(kernel)),
            html.heading("Every stage"),
            html.paragraph(
                "Click a line of any stage: what came from the same line of Python lights up in all of them. "
                "A click on the title of a stage folds it away."
            ),
            *_stages(kernel),
            html.heading("Time to compile"),
            html.bars({_title(stage): ms for stage, ms in kernel.stage_ms.items()}, " ms"),
            html.heading("Instruction mix"),
            html.paragraph(
                "Counted in the code, not while it runs: the body of a loop counts once."
            ),
            html.bars({name: float(count) for name, count in kernel.mix.items()}),
            html.heading("Memory and tensor-core instructions"),
            html.table(
                ["instruction", "count"], [[o, str(c)] for o, c in accesses(kernel).items()]
            ),
        ]
    if others:
        names = html.join(html.element("li", html.element("code", name)) for name in others)
        body += [html.heading("Other variants of this kernel"), html.element("ul", names)]
    return html.page(f"{kernel.kernel}", *body, script=SCRIPT, style=STYLE)


def _verdict(findings: Sequence[Finding]) -> list[html.Markup]:
    if not findings:
        return [html.notice("good", "No findings: nothing spills, nothing waits without need.")]
    return [
        html.notice("bad" if finding.severity == "fail" else "note", finding.message)
        for finding in findings
    ]


def _title(stage: str) -> str:
    return TITLES.get(stage, "SASS (ptxas)" if stage == "cubin" else stage)


def _stages(kernel: Compiled) -> list[html.Markup]:
    rows, source, maps = _source(kernel)
    texts = {"source": source}
    for stage, reader in READERS.items():
        if stage in kernel.stages:
            lines = list(reader(kernel.stages[stage]))
            texts[stage] = [line for line, _ in lines]
            maps[stage] = [_row(places, rows) for _, places in lines]
    used = {row for stage, lines in maps.items() if stage != "source" for row in lines}
    maps["source"] = [row if row in used else 0 for row in maps["source"]]
    columns = [_column(stage, texts[stage]) for stage in STAGES if stage in texts]
    return [html.element("div", *columns, class_="stages"), html.data("lines", maps)]


def _source(kernel: Compiled) -> tuple[dict[Place, int], list[str], dict[str, list[int]]]:
    """The functions below one another, and at which row of that each line of a file stands."""
    rows: dict[Place, int] = {}
    lines: list[str] = []
    for source in kernel.sources:
        lines.append(f"# {Path(source.path).name}, line {source.first_line}")
        for offset, line in enumerate(source.text.splitlines()):
            lines.append(line)
            rows[source.path, source.first_line + offset] = len(lines)
        lines.append("")
    return rows, lines, {"source": list(range(1, len(lines) + 1))}


def _row(places: Sequence[Place], rows: Mapping[Place, int]) -> int:
    """The innermost place that is shown; 0 for none."""
    return next((rows[place] for place in places if place in rows), 0)


def _column(stage: str, lines: Sequence[str]) -> html.Markup:
    note = html.element("small", f"{len(lines)} lines")
    title = html.element("summary", f"{_title(stage)} ", note)
    text = html.element("pre", "\n".join(lines))
    return html.element("details", title, text, data_stage=stage, open=stage in OPEN)


STYLE = """
.stages { display: flex; gap: .5rem; overflow-x: auto; height: 78vh; border: 1px solid var(--line); padding: .4rem; }
.stages details { flex: 0 0 auto; display: flex; flex-direction: column; height: 100%; overflow: auto; }
.stages details[open] { flex: 1 0 32rem; border-right: 1px solid var(--line); }
.stages summary { cursor: pointer; font-weight: 600; position: sticky; top: 0; left: 0; background: var(--paper); }
.stages small { color: var(--soft); font-weight: 400; } .stages pre { margin: 0; tab-size: 4; line-height: 1.35; }
.stages pre span { display: block; min-height: 1.35em; padding-left: .4rem; border-left: 3px solid transparent; }
.stages pre span[data-row] { cursor: pointer; border-left-color: hsl(var(--hue) 55% 60%); }
.stages pre span.lit { background: hsl(var(--hue) 70% 60% / .28); }
@media (max-width: 60rem) { .stages { flex-direction: column; height: auto; } .stages details { max-height: 60vh; } }
"""

SCRIPT = """
const lines = JSON.parse(document.getElementById("lines")?.textContent ?? "{}");
const stages = [...document.querySelectorAll("details[data-stage]")];
let lit = 0;

function prepare(stage) {
  if (stage.dataset.ready) return;
  const pre = stage.querySelector("pre");
  const rows = lines[stage.dataset.stage] ?? [];
  const parts = document.createDocumentFragment();
  pre.textContent.split("\\n").forEach((text, index) => {
    const line = document.createElement("span");
    line.textContent = text;
    const row = rows[index] ?? 0;
    if (row) {
      line.dataset.row = row;
      line.style.setProperty("--hue", (row * 47) % 360);
      if (row === lit) line.classList.add("lit");
    }
    parts.append(line);
  });
  pre.replaceChildren(parts);
  stage.dataset.ready = rows.filter(Boolean).length + " of " + pre.childElementCount;
}

function light(row, from) {
  lit = row;
  document.querySelectorAll(".lit").forEach((line) => line.classList.remove("lit"));
  for (const stage of stages) {
    const found = [...stage.querySelectorAll(`span[data-row="${row}"]`)];
    found.forEach((line) => line.classList.add("lit"));
    if (stage !== from && stage.open && found.length) {
      stage.scrollTop = found[0].offsetTop - stage.offsetTop - stage.clientHeight / 3;
    }
  }
}

for (const stage of stages) {
  if (stage.open) prepare(stage);
  stage.addEventListener("toggle", () => prepare(stage));
  stage.addEventListener("click", (event) => {
    const line = event.target.closest("span[data-row]");
    if (line) light(Number(line.dataset.row), stage);
  });
}
"""
