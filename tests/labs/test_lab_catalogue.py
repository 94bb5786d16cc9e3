"""Every lab is whole: readable in both languages, its code exists, and a list of them needs no torch."""

import json
import re
import subprocess
import sys
from typing import get_args

import pytest

from cairn.core.errors import UsageError
from cairn.labs.catalogue import all_labs, find_lab, labs_of
from cairn.labs.code_location import find_place
from cairn.labs.lab import AREAS, Lab, Need, Words

CHINESE = re.compile(r"[\u4e00-\u9fff]")
# A text that is only a name or a formula reads the same in both languages.
SYMBOLS = re.compile(r"[A-Z0-9/_.,:;+*=()<>\-–% ]*|[\w.\-/]+")


def is_symbols(text: str) -> bool:
    return SYMBOLS.fullmatch(text) is not None or " = " in text


def texts(lab: Lab) -> dict[str, Words]:
    questions = {
        f"{part} {number}": getattr(question, part)
        for number, question in enumerate(lab.questions, 1)
        for part in ("ask", "answer")
    }
    causes = {f"cause {number}": cause for number, cause in enumerate(lab.causes, 1)}
    return {"title": lab.title, "hypothesis": lab.hypothesis, **causes, **questions}


def test_every_text_is_there_in_both_languages():
    faults = []
    for lab in all_labs().values():
        for what, words in texts(lab).items():
            where = f"{lab.name}: {what}"
            if not words.en.strip() or not words.zh.strip():
                faults.append(f"{where} is empty")
            elif CHINESE.search(words.en):
                faults.append(f"{where}: Chinese in the English text")
            elif not CHINESE.search(words.zh) and not is_symbols(words.zh):
                faults.append(f"{where}: no Chinese in {words.zh!r}")
    assert faults == []


def test_every_code_place_exists():
    faults = []
    for lab in all_labs().values():
        for place in lab.code:
            try:
                find_place(place)
            except ValueError as error:
                faults.append(f"{lab.name}: {error}")
    assert faults == []


def test_every_lab_is_sane():
    faults = []
    for lab in all_labs().values():
        checks = {
            "name": re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", lab.name) is not None,
            "area": lab.area in AREAS,
            "seconds": 0 < lab.seconds <= 30,
            "needs": set(lab.needs) <= set(get_args(Need)),
            "code": len(lab.code) >= 1,
            "reading": all(title.strip() for title in lab.reading) and len(lab.reading) >= 1,
            "questions": len(lab.questions) == 3 and len({q.ask.en for q in lab.questions}) == 3,
            "causes": len(lab.causes) == 2,
        }
        faults += [f"{lab.name}: {what}" for what, fine in checks.items() if not fine]
    assert faults == []


def test_there_are_enough_in_every_area():
    assert len(all_labs()) >= 60
    assert {area: len(labs_of(area)) for area in AREAS if not labs_of(area)} == {}


ALONE = """
import importlib, json, pkgutil, sys
for absent in ("torch", "triton", "psutil", "zmq", "starlette", "uvicorn", "transformers", "huggingface_hub", "yaml"):
    sys.modules[absent] = None
from cairn.labs.lab import AREAS
faults = {}
for area in AREAS:
    package = importlib.import_module(f"cairn.labs.{area}")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("_"):
            continue
        try:
            importlib.import_module(f"cairn.labs.{area}.{module.name}")
        except ImportError as error:
            faults[f"{area}/{module.name}"] = str(error)
print(json.dumps(faults))
"""


def test_a_list_needs_neither_torch_nor_what_a_gpu_machine_may_lack():
    """A GPU host may have only torch, triton, numpy, safetensors, tokenizers, msgspec, tyro and rich."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def test_one_lab_is_found_by_its_name():
    assert find_lab("roofline") is all_labs()["roofline"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("rooflin", "roofline"), ("context_switch", "context-switch"), ("_device_manager", None),
     ("", None), ("..", None), ("a.b", None)],
)  # fmt: skip
def test_a_wrong_name_suggests_the_nearest(name, meant):
    with pytest.raises(UsageError, match="there is no lab") as raised:
        find_lab(name)
    if meant is not None:
        assert raised.value.hint == f"did you mean '{meant}'?"


def test_a_wrong_area_suggests_the_nearest():
    with pytest.raises(UsageError, match="there is no area 'servin'") as raised:
        labs_of("servin")
    assert raised.value.hint == "did you mean 'serving'?"
