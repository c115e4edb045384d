"""The shape of mam.py: a reader of one long file must always know where they are and what may depend on what."""
from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import symtable
import tokenize
from typing import Callable, Dict, Iterator, List, NamedTuple, Set, Tuple, Union

import pytest

from support import ROOT, free_port
from support.cli import Mam

SOURCE = (ROOT / "mam.py").read_text(encoding="utf-8")
LINES = SOURCE.splitlines()
TREE = ast.parse(SOURCE)
MAX_FUNCTION_LINES = 60
Function = (ast.FunctionDef, ast.AsyncFunctionDef)

# What the top of mam.py may import: loaded by every interpreter already, or nearly free. All else where it is used.
CHEAP_MODULES = {"__future__", "os", "sys", "time", "collections"}
PURE_MODULES = {"json", "json.encoder", "hmac", "hashlib", "re", "math", "binascii"}
PURE_PATHS = {"normpath", "isabs", "relpath", "join", "dirname", "basename", "splitext"}
PROCESS_CALLS = {"kill", "killpg", "fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", "waitpid"}


class Section(NamedTuple):
    number: int
    name: str
    line: int


def _sections() -> List[Section]:
    found = []
    for at, line in enumerate(LINES[1:], 2):
        banner = re.match(r"# (\d+)\. (\S.*)$", line)
        if banner and re.match(r"# ={60,}$", LINES[at - 2]):
            found.append(Section(int(banner.group(1)), banner.group(2).strip(), at))
    return found


SECTIONS = _sections()


def section_of(line: int) -> int:
    """The number of the section a line is in; 0 for what stands above the first banner."""
    return max([section.number for section in SECTIONS if section.line - 1 <= line], default=0)


def where(line: int) -> str:
    return f"mam.py:{line}: {LINES[line - 1].strip()}"


def imports(tree: ast.AST = TREE) -> Iterator[Tuple[str, int, bool]]:
    """(module, line, whether inside a function) of every import."""
    inside = {id(node) for outer in ast.walk(tree) if isinstance(outer, Function) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno, id(node) in inside


def attributes(module: str) -> Iterator[Tuple[str, int]]:
    """(attribute, line) of every `module.attribute`."""
    for node in ast.walk(TREE):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
            yield node.attr, node.lineno


def outside(allowed: Set[int], found: List[int]) -> List[str]:
    return [where(line) for line in found if section_of(line) not in allowed]


def defined_names() -> Dict[str, int]:
    """Module-level name -> the section it is first defined in."""
    names: Dict[str, int] = {}
    for node in TREE.body:
        if isinstance(node, (*Function, ast.ClassDef)):
            names.setdefault(node.name, section_of(node.lineno))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    names.setdefault(target.id, section_of(node.lineno))
    return names


NAMES = defined_names()


def references() -> Iterator[Tuple[str, int, int, str]]:
    """(module-level name, section of the reference, line, by whom), those hidden by a local name left out."""
    def inside(table: symtable.SymbolTable, line: int) -> Iterator[Tuple[str, int, int, str]]:
        for symbol in table.get_symbols():
            if symbol.get_name() in NAMES and symbol.is_global() and symbol.is_referenced():
                yield symbol.get_name(), section_of(line), line, table.get_name()
        for child in table.get_children():
            yield from inside(child, child.get_lineno())

    top = symtable.symtable(SOURCE, "mam.py", "exec")
    for child in top.get_children():
        yield from inside(child, child.get_lineno())
    for node in TREE.body:                      # what runs when the module is loaded, outside of any function
        skipped = {id(deep) for inner in ast.walk(node) if isinstance(inner, (*Function, ast.Lambda))
                   for part in (inner.body if isinstance(inner.body, list) else [inner.body])
                   for deep in ast.walk(part)}
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load) and id(name) not in skipped \
                    and name.id in NAMES:
                yield name.id, section_of(name.lineno), name.lineno, "the module"


def functions() -> List[Union[ast.FunctionDef, ast.AsyncFunctionDef]]:
    return [node for node in ast.walk(TREE) if isinstance(node, Function)]


# ---- the map ---------------------------------------------------------------------------------------------------

def test_sections_stand_in_rising_order() -> None:
    """Out of order, "a section uses only those above it" tells a reader nothing."""
    numbers = [section.number for section in SECTIONS]
    assert len(numbers) > 10, "the banners were not found"
    assert numbers == sorted(set(numbers)) and numbers[0] == 1


def test_the_map_in_the_docstring_is_the_territory() -> None:
    """A reader looks a section up in the map and greps for it by its number and name."""
    mapped = re.findall(r"^ {4,5}(\d+)\. (.+?)(?: {2,}|$)", ast.get_docstring(TREE, clean=False) or "", re.M)
    assert [(int(number), name) for number, name in mapped] == [(part.number, part.name) for part in SECTIONS]


def test_a_banner_is_closed_and_says_what_its_section_is_about() -> None:
    for section in SECTIONS:
        end = section.line
        while LINES[end].startswith("#") and not re.match(r"# ={60,}$", LINES[end]):
            end += 1
        prose = [line for line in LINES[section.line:end] if len(line) > 2]
        assert re.match(r"# ={60,}$", LINES[end]) and 1 <= len(prose) <= 6, where(section.line)


def test_every_definition_is_in_a_section() -> None:
    homeless = [node.name for node in TREE.body if isinstance(node, (*Function, ast.ClassDef))
                and section_of(node.lineno) == 0]
    assert homeless == []


# ---- only here -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("modules, sections", [
    ({"sqlite3", "_sqlite3"}, {7}),
    ({"subprocess", "multiprocessing", "pty"}, {8}),
    ({"paho", "ssl", "socket"}, {9}),
    ({"argparse", "optparse", "getopt"}, {19, 20}),
], ids=["sqlite3", "subprocess", "paho", "argparse"])
def test_a_dependency_is_imported_in_its_own_section_only(modules: Set[str], sections: Set[int]) -> None:
    """What is everybody's can be changed by nobody: one section answers for each dependency."""
    found = [line for name, line, _ in imports() if name.split(".")[0] in modules]
    assert found and outside(sections, found) == []


@pytest.mark.parametrize("module", ["paho", "ssl", "sqlite3", "argparse", "subprocess"])
def test_what_is_expensive_is_imported_inside_functions(module: str) -> None:
    """At the top, every `mam publish` of an agent would pay for it."""
    found = [(line, within) for name, line, within in imports() if name.split(".")[0] == module]
    assert found and all(within for _, within in found), [where(line) for line, within in found if not within]


def test_only_the_configuration_sees_the_environment() -> None:
    """A variable read elsewhere escapes `.mam.env`, the list of secrets, and whoever documents the variables."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = [line for name, line in attributes("os") if name in names]
    assert len(found) >= 1 and outside({4}, found) == []


def test_only_the_process_section_starts_and_signals_processes() -> None:
    """A signal sent elsewhere is sent to a number, not to a process whose identity was checked."""
    found = [line for name, line in attributes("os")
             if name in PROCESS_CALLS or name.startswith(("exec", "spawn")) or name == "pidfd_open"]
    found += [line for name, line in attributes("signal") if name in ("pthread_kill", "raise_signal")]
    assert len(found) >= 1 and outside({8}, found) == []


def io_in(node: ast.AST) -> Iterator[str]:
    """What in a piece of code touches the world: files, clock, randomness, environment, streams, processes."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in ("open", "print", "input", "exec", "eval"):
            yield where(part.lineno)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            if part.value.id in ("sys", "time") or part.value.id == "os" and part.attr not in ("path", "fspath"):
                yield where(part.lineno)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Attribute):
            inner = part.value
            if isinstance(inner.value, ast.Name) and inner.value.id == "os" and inner.attr == "path" \
                    and part.attr not in PURE_PATHS:
                yield where(part.lineno)
        elif isinstance(part, ast.Import):
            if not {name.name for name in part.names} <= PURE_MODULES:
                yield where(part.lineno)
        elif isinstance(part, ast.ImportFrom) and part.module not in PURE_MODULES:
            yield where(part.lineno)


@functools.lru_cache(maxsize=None)
def impure_names() -> Set[str]:
    """Module-level functions and classes that touch the world, directly or through another one."""
    bodies = {node.name: node for node in TREE.body if isinstance(node, (*Function, ast.ClassDef))}
    impure = {name for name, node in bodies.items() if any(io_in(node))}
    uses = {name: {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and part.id in bodies}
            for name, node in bodies.items()}
    grown = True
    while grown:
        more = {name for name, used in uses.items() if used & impure} - impure
        impure |= more
        grown = bool(more)
    return impure


@pytest.mark.parametrize("section", [5, 6])
def test_the_model_and_the_envelopes_are_pure(section: int) -> None:
    """What decides a transition and checks a signature must give the same answer for the same input, always."""
    parts = [node for node in TREE.body if section_of(node.lineno) == section]
    assert parts
    assert [found for node in parts for found in io_in(node)] == []
    used = [(name, line) for name, of, line, _ in references() if of == section and name in impure_names()]
    assert used == [], "uses something that touches the world"


def test_views_read_and_write_nothing() -> None:
    """A line of a list must not depend on anything but the job it shows, and its age."""
    parts = [node for node in TREE.body if section_of(node.lineno) == 18]
    assert parts
    assert [found for node in parts for found in io_in(node)] == []
    allowed = {1, 2, 3, 5, 6, 18}
    used = [(name, line) for name, of, line, _ in references() if of == 18 and NAMES[name] not in allowed | {0}]
    assert used == []


# ---- bottom-up -------------------------------------------------------------------------------------------------

def test_a_section_uses_only_those_above_it() -> None:
    """Read from the top, nothing may be met that was not yet explained."""
    found = list(references())
    assert len(found) > 500, "the references were not found"
    upward = sorted({f"section {of}: {who} (line {line}) uses {name} of section {NAMES[name]}"
                     for name, of, line, who in found if NAMES[name] > of})
    assert upward == []


def test_the_top_of_the_file_imports_what_costs_nothing() -> None:
    """Each import at the top is paid for by every publish of every agent."""
    tops = {}
    for node in TREE.body:
        if isinstance(node, ast.If):            # TYPE_CHECKING is False when it runs
            assert isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" or \
                not list(imports(node)), where(node.lineno)
            continue
        for name, line, within in imports(node):
            if not within:
                tops[name] = line
    assert {"os", "sys"} <= set(tops) <= CHEAP_MODULES, tops


# ---- habits ----------------------------------------------------------------------------------------------------

def test_no_function_is_longer_than_a_screen() -> None:
    long = [f"{node.name}: {(node.end_lineno or 0) - node.lineno + 1} lines" for node in functions()
            if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES]
    assert len(functions()) > 100 and long == []


def test_what_is_public_says_what_it_does() -> None:
    """Without a docstring, a function's units, errors and crash behaviour are known to its author only.

    Spared: `add_x` (it only declares arguments), the dunder methods, names within a function, and what is so
    short that it says it itself (eight lines).
    """
    silent = []
    holders: List[ast.AST] = [TREE] + [node for node in TREE.body if isinstance(node, ast.ClassDef)]
    for holder in holders:
        for node in holder.body:                # type: ignore[attr-defined]
            if not isinstance(node, (*Function, ast.ClassDef)) or node.name.startswith(("_", "add_")):
                continue
            short = (node.end_lineno or 0) - node.lineno + 1 <= 8 and isinstance(node, Function)
            if not short and not ast.get_docstring(node):
                silent.append(where(node.lineno))
    assert silent == []


def test_every_command_is_a_pair() -> None:
    """A `cmd_x` without its `add_x` next to it: a command whose options nobody finds."""
    bodies = [node.name for node in TREE.body if isinstance(node, Function)]
    commands = [name[4:] for name in bodies if name.startswith("cmd_")]
    assert len(commands) > 10
    apart = [name for name in commands if f"add_{name}" not in bodies
             or bodies.index(f"cmd_{name}") - bodies.index(f"add_{name}") != 1]
    assert apart == []


def test_every_argument_and_result_has_a_type() -> None:
    bare = []
    for node in functions():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        missing = [one.arg for one in arguments if one.annotation is None and one.arg not in ("self", "cls")]
        if missing or node.returns is None and node.name != "__init__":
            bare.append(f"{where(node.lineno)} {missing}")
    assert bare == []


def comment_lines() -> Set[int]:
    return {token.start[0] for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline)
            if token.type == tokenize.COMMENT}


def test_no_error_is_swallowed_without_a_reason() -> None:
    """A swallowed error is news that nobody gets: only a known one may be, and the line says why."""
    comments = comment_lines()
    silent = []
    for node in ast.walk(TREE):
        if not isinstance(node, ast.ExceptHandler):
            continue
        only = node.body[0]
        swallowed = len(node.body) == 1 and isinstance(only, (ast.Pass, ast.Continue))
        caught = ast.unparse(node.type) if node.type is not None else ""
        if node.type is None or swallowed and caught in ("Exception", "BaseException"):
            silent.append("everything: " + where(node.lineno))
        elif swallowed and not comments & set(range(node.lineno, (only.end_lineno or 0) + 1)):
            silent.append("no reason: " + where(node.lineno))
    assert silent == []


def test_nothing_is_left_for_later() -> None:
    """An unfinished thought belongs into an issue, where it is found."""
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK|TBD)\b")
    assert [where(at) for at, line in enumerate(LINES, 1) if words.search(line)] == []
    assert words.search("# TODO: later"), "the pattern finds nothing at all"


def numeric_constants() -> Iterator[Tuple[str, int]]:
    for node in TREE.body:
        if not isinstance(node, ast.Assign):
            continue
        targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
        values = node.value.elts if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple) \
            else [node.value]
        for target, value in zip(targets, values):
            numbers = [part for part in ast.walk(value) if isinstance(part, ast.Constant)]
            arithmetic = all(isinstance(part, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop))
                             for part in ast.walk(value))
            if isinstance(target, ast.Name) and arithmetic and target.id.isupper() and \
                    all(type(part.value) in (int, float) for part in numbers):
                yield target.id, node.lineno


def test_a_number_says_its_unit() -> None:
    """Seconds taken for milliseconds, bytes for characters: the name is the only place to see it."""
    units = ("_S", "_MS", "_BYTES", "_CHARS", "_BITS")
    counts = ("_VERSION", "_MISSES", "_ITERATIONS", "_DEPTH", "_INTEGER", "_WINDOW", "_FACTOR", "_COUNT", "_LINES",
              "_LIMIT", "_SLOTS")
    found = list(numeric_constants())
    assert len(found) > 15, "the constants were not found"
    assert [where(line) for name, line in found if not name.endswith(units + counts)] == []
    timed = re.compile(r"TIMEOUT|WAIT|GRACE|BUDGET|PERIOD|DELAY|LINGER|POLL|INTERVAL|SETTLE")
    assert [where(line) for name, line in found if timed.search(name) and not name.endswith(("_S", "_MS"))] == []


def test_the_top_level_holds_what_was_agreed_and_nothing_else() -> None:
    """Whoever clones this sees at once which five things there are."""
    done = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=str(ROOT),
                          stdout=subprocess.PIPE, check=True)
    entries = {name.split("/")[0] for name in done.stdout.decode().split("\0") if name}
    assert {"mam.py", "tests", "build.sh", "Makefile"} <= entries
    assert {name for name in entries if not name.startswith(".")} <= {
        "mam.py", "tests", "build.sh", "Makefile", "README.md", "LICENSE"}


# ---- what a start costs ------------------------------------------------------------------------------------------

EXPENSIVE = ("paho", "ssl", "_ssl", "socket", "logging", "asyncio", "email", "http", "urllib", "typing",
             "unittest", "importlib.metadata")


@pytest.fixture
def imported_by(mam: Mam) -> Callable[..., Set[str]]:
    """`imported_by(words, env=...)`: the modules a command of mam loads."""
    def run(*words: str, code: int = 0, **env: str) -> Set[str]:
        argv = mam.argv(*words)
        done = subprocess.run([argv[0], "-I", "-X", "importtime", *argv[1:]], env={**mam.environment(), **env},
                              cwd=str(mam.workspace), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=60)
        text = done.stderr.decode("utf-8", "replace")
        assert done.returncode == code, text[-2000:]
        return set(re.findall(r"^import time:.*\| +(\S+)$", text, re.M))
    return run


def expensive(modules: Set[str]) -> Set[str]:
    return {name for name in modules if name in EXPENSIVE or name.split(".")[0] in ("paho", "ssl", "asyncio")}


def test_looking_and_publishing_without_a_broker_load_no_network_code(
        mam: Mam, imported_by: Callable[..., Set[str]]) -> None:
    """An agent publishes often; it must not wait for a library that this event does not need."""
    job = mam("register", "--agent-session", "queue:q", "--prompt", "x", check=0).stdout.strip()
    imported_by("list")                         # the first start may have to fill a cache
    for words in (["list"], [], ["get", job], ["publish", "--job", job, "--event", "started"],
                  ["publish", "--job", job, "--event", "completed", "--detail", "done"], ["wait", job]):
        modules = imported_by(*words)
        assert "mam" in modules and "sqlite3" in modules, "the modules were not found"
        assert expensive(modules) == set(), words


def test_publishing_to_a_broker_does_load_it(mam: Mam, imported_by: Callable[..., Set[str]]) -> None:
    """Else the test above would prove nothing."""
    there = {"MQTT_BROKER": "127.0.0.1", "MQTT_PORT": str(free_port())}
    job = mam("register", "--agent-session", "queue:q", "--prompt", "x", check=0, env=dict(there)).stdout.strip()
    modules = imported_by("publish", "--job", job, "--event", "started", "--attempts", "1", code=2, **there)
    assert "paho" in expensive(modules)
