"""What the documentation says is so: links lead somewhere, commands exist, made pages are up to date, examples run.

Every block of commands or Python in the README and docs/ is run by the slow tests, page by page in a folder of its own,
unless the comment before it says why not: <!-- not run: needs root -->. Blocks behind <!-- run: quick --> run always.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import manyhands as mh
from docs_pages import DOCS, ROOT, Block, anchors, blocks, commands, links, ours, pages

SHELL, PYTHON = ("sh", "bash"), ("py", "python")
PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
ALL = [block for page in PAGES.values() for block in blocks(page, *SHELL, *PYTHON)]
QUICK = [block for block in ALL if block.how == "quick"]
NAMED_FILE = re.compile(r"(?<![\w./~-])((?:[\w-]+/)*[\w-]+\.(?:py|md))(?!\w)")
SECONDS = {"quick": 60, "slow": 280}


def by_name(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in found])


# ---------------------------------------------------------------- links


@pytest.mark.quick(every=17)
@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name}: {link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{name}: {link} leads out of the project"
        if anchor:
            assert anchor in anchors(target), f"{name}: {link}: no such heading; there are {sorted(anchors(target))}"


def test_every_page_can_be_reached() -> None:
    """From the README, by links."""
    seen: set[Path] = set()
    wanted = [ROOT / "README.md"]
    while wanted:
        page = wanted.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        found = [link.partition("#")[0] for link in links(page) if not re.match(r"[a-z]+:", link)]
        wanted += [(page.parent / link).resolve() for link in found if link]
    assert {str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md") if page not in seen} == set()


@pytest.mark.slow
def test_source_names_pages_that_exist() -> None:
    """Docstrings, hints and tests that send people to a page of docs/."""
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / page).exists(), f"{path.relative_to(ROOT)} names {page}, which is not there"


def prose(path: Path) -> Iterator[str]:
    """The comments of a source file that names others, and its docstrings, those of attributes too."""
    text = path.read_text()
    if not NAMED_FILE.search(text):  # to read its tokens takes longer
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def is_there(name: str, named_in: Path) -> bool:
    """Whether a file of this name is where a reader looks for it: beside the one that names it (for a test, beside what
    it tests), or under a path that starts at a room, at the sources or at the project."""
    package, tests = ROOT / "src" / "manyhands", ROOT / "tests"
    places = [named_in.parent, package, package.parent, ROOT]
    if named_in.is_relative_to(tests):
        places += [tests, package / named_in.parent.relative_to(tests)]
    return any((place / name).is_file() for place in places)


@pytest.mark.slow
def test_source_names_files_that_exist() -> None:
    """Docstrings and comments that send a reader to another file."""
    count = 0
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for name in NAMED_FILE.findall("\n".join(prose(path))):
            assert is_there(name, path), f"{path.relative_to(ROOT)} names {name}, which is not there"
            count += 1
    assert count >= 80


def test_names_of_no_file_are_found() -> None:
    named_in = ROOT / "src" / "manyhands" / "runtime" / "run.py"
    assert NAMED_FILE.findall("see elastic_job.py, (job/base.py) and `README.md`; not a.python or gone.pyc") == [
        "elastic_job.py", "job/base.py", "README.md",
    ]  # fmt: skip
    assert all(
        is_there(name, named_in) for name in ("elastic_job.py", "job/base.py", "README.md", "manyhands/job/base.py")
    )
    assert not any(is_there(name, named_in) for name in ("agreeing.py", "job.py", "api/elastic_job.py", "GONE.md"))


def test_explanations_name_files_that_exist() -> None:
    """Where a page is about a room it names its files alone."""
    known = [
        path.as_posix()
        for room in ("src", "tests", "docs", "examples", "benchmarks")
        for path in (ROOT / room).rglob("*.py")
    ]
    for name in [one for one in PAGES if one == "ARCHITECTURE.md" or one.startswith("docs/explanation/")]:
        for named in re.findall(r"`([\w/]+\.py)`", PAGES[name].read_text()):
            assert any(path.endswith(f"/{named}") for path in known), f"{name} names {named}, which is not there"


# ---------------------------------------------------------------- commands


@cache
def app() -> Any:
    from typer.main import get_command

    from manyhands.cli.main import whole_app

    return get_command(whole_app())


def behind(command: Any, words: list[str]) -> list[str]:
    """What follows a group; one that has a default command may be used without a command's name."""
    default = getattr(command, "default_command", "")
    return words if not default or (words and words[0] in command.commands) else [default, *words]


def check_command(words: list[str], where: str) -> None:
    """Parses a command line as the program would, and runs nothing."""
    command, name, rest = app(), "manyhands", [word for word in words if word != "--debug"]
    if "--help" in rest or "-h" in rest or not rest or rest[0].startswith("-"):
        return
    while True:
        if hasattr(command, "commands"):
            rest = behind(command, rest)
            assert rest, f"{where}: '{name}' needs a command behind it"
            assert rest[0] in command.commands, f"{where}: there is no '{name} {rest[0]}'"
            command, name, rest = command.commands[rest[0]], f"{name} {rest[0]}", rest[1:]
            continue
        try:
            command.make_context(name, list(rest))
        except Exception as error:  # click's own kinds, which typer may carry under its own name
            said = error.format_message() if hasattr(error, "format_message") else repr(error)
            pytest.fail(f"{where}: {name} {' '.join(rest)}: {said}")
        return


def test_commands_parse() -> None:
    count = 0
    for block in ALL:
        if block.language in SHELL:
            for words in commands(block.text):
                if (rest := ours(words)) is not None:
                    check_command(rest, block.name)
                    count += 1
    assert count >= 60, "the documentation has lost its commands, or they are not found"


def test_wrong_commands_are_found() -> None:
    """The checks themselves: a misspelt command, option or value is no secret to them."""
    text = "PORT=$(python3 -c 'print(1)')\nsudo manyhands train -n 2 \\\n -e 5 > log & # so\nls | manyhands plan -c y"
    assert [ours(words) for words in commands(text) if ours(words) is not None] == [
        ["train", "-n", "2", "-e", "5"], ["plan", "-c", "y"],
    ]  # fmt: skip
    for wrong in (["trian"], ["split", "tran"], ["train", "--epoch", "3"], ["plan", "--batch-size", "none"], ["lab"]):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check_command(wrong, "here")


def test_commands_in_sentences_exist() -> None:
    """`manyhands plan --compare` and the like: the command, and every option of it."""
    count = 0
    for name, page in PAGES.items():
        if name == "CHANGELOG.md" or "reference/" in name:
            continue
        for text in re.findall(r"`((?:sudo )?manyhands [^`\n]+)`", page.read_text()):
            words = [word.strip("[],") for word in text.removeprefix("sudo ").split()[1:]]
            command = app()
            while words and hasattr(command, "commands") and (words := behind(command, words))[0] in command.commands:
                command = command.commands[words.pop(0)]
            known = {option for one in command.params for option in [*one.opts, *one.secondary_opts]} | {"--help", "-h"}
            used = [word.partition("=")[0] for word in words if re.match(r"-{1,2}[a-z]", word)]
            is_group = hasattr(command, "commands")
            assert not is_group or not words or words[0][0] in "-…." or words[0].isupper(), f"{name}: `{text}`"
            for option in used:
                if "--" in words and words.index("--") < words.index(option):
                    break
                assert option in known or option == "--debug", f"{name}: `{text}`: no such option {option}"
            count += 1
    assert count >= 20


def test_files_named_beside_commands_exist() -> None:
    for block in ALL:
        for word in re.findall(r"\b(?:tests|docs|examples)/[\w./-]+\.(?:py|md|yaml|txt)", block.text):
            assert (ROOT / word).exists(), f"{block.name}: {word} is not there"


def test_processes_are_ended_by_their_own_ids() -> None:
    """`pkill`, `killall` and "the newest of that name" may be somebody else's run."""
    lines = [(block.name, line) for block in ALL for line in block.text.splitlines() if re.search(r"\bkill\b", line)]
    lines = [(name, line) for name, line in lines if not re.search(r"manyhands lab|^\s*#", line)]
    assert len(lines) >= 4, "there are some"
    for name, line in lines:
        whose = r"\bkill (-9 )?(\$\(manyhands status \S+ --pid \S+\)|\$[A-Z]+|\$!)"
        assert re.search(whose, line.partition("  #")[0]), f"{name}: {line}"
    shown = [*PAGES.values(), *(ROOT / "src" / "manyhands" / "cli").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    by_words = [str(path) for path in shown if re.search(r"\b(pkill|killall|pgrep)\b", path.read_text())]
    assert by_words == []


def test_what_is_not_run_says_why() -> None:
    for block in ALL:
        assert block.how != "not run" or len(block.why) >= 5, f"{block.name}: say why it is not run"


# ---------------------------------------------------------------- Python


def test_python_names_exist() -> None:
    """Every mh.name, and every keyword given to it."""
    count = 0
    for block in ALL:
        if block.language not in PYTHON:
            continue
        for node in ast.walk(ast.parse(block.text, block.name)):
            if isinstance(node, ast.Attribute) and (path := _path(node)) and path[0] == "mh":
                found: Any = mh
                for name in path[1:]:
                    if not inspect.ismodule(found) and not inspect.isclass(found):
                        break
                    assert hasattr(found, name), f"{block.name}: there is no {'.'.join(path)}"
                    found = getattr(found, name)
                count += 1
            if isinstance(node, ast.Call) and (path := _path(node.func)) and path[0] == "mh" and len(path) == 2:
                parameters = inspect.signature(getattr(mh, path[1])).parameters
                if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                    continue
                for keyword in node.keywords:
                    if keyword.arg is not None:  # else **options
                        assert keyword.arg in parameters, f"{block.name}: mh.{path[1]} takes no {keyword.arg}"
    assert count >= 15


def _path(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _path(node.value)):
        return [*before, node.attr]
    return []


def test_documents_are_valid() -> None:
    """Clusters and plans that pages show, as a person would type them."""
    count = 0
    for page in PAGES.values():
        for block in blocks(page, "yaml"):
            document = yaml.safe_load(block.text)
            if isinstance(document, dict) and "devices" in document:
                mh.Cluster.from_dict(document)
                count += 1
            elif isinstance(document, dict) and "stages" in document and "network" in document:
                mh.Plan.from_dict(document)
                count += 1
    assert count >= 2


# ---------------------------------------------------------------- made pages


@pytest.mark.slow
def test_made_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a formatter's --check. To write them: python docs/generate.py."""
    monkeypatch.syspath_prepend(str(DOCS))
    import generate

    assert [str(path.relative_to(ROOT)) for path in generate.stale()] == [], "Run: python docs/generate.py"


def test_pictures_are_small_and_need_no_network() -> None:
    for path in (DOCS / "drawings").iterdir():
        if path.suffix in (".svg", ".cast"):
            assert path.stat().st_size <= 200_000, path.name
            named = set(re.findall(r"https?://([^/:\s\"'<)\\]+)", path.read_text()))
            hosts = named - {"www.w3.org", "127.0.0.1"}  # the name of SVG itself; what a run printed of its own machine
            assert not hosts, f"{path.name} names {hosts}"


# ---------------------------------------------------------------- running


def run(block: Block, folder: Path, seconds: float) -> None:
    """In a session of its own, which is ended as a whole: whatever a block left running goes with it."""
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1",
        "MANYHANDS_HOME": str(folder / ".manyhands"), "PYTHONUNBUFFERED": "1", "COLUMNS": "120",
    }  # fmt: skip
    environment.pop("PYTEST_CURRENT_TEST", None)
    if block.language in SHELL:
        script = (
            folder / ".block.sh"
        )  # whose words are not the shell's own: a block may look for a process by its words
        script.write_text(block.text)
        words = ["bash", "-euo", "pipefail", str(script)]
    else:
        words = [sys.executable, "-c", block.text]
    log = folder / ".output.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_session(process.pid)
            process.wait(timeout=10)
    said = log.read_text(errors="replace")[-3000:]
    assert code is not None, f"{block.name}: not done within {seconds} s:\n{said}"
    assert code == 0, f"{block.name}: exit code {code}:\n{block.text}\n{said}"


def _end_session(session: int) -> None:
    import psutil

    for process in psutil.process_iter(["pid"]):
        try:
            if os.getsid(process.pid) == session:
                os.kill(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


@pytest.mark.quick(every=3)
@by_name(QUICK)
def test_quick_blocks_run(block: Block, tmp_path: Path) -> None:
    run(block, tmp_path, SECONDS["quick"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if any(
    block.how != "not run" for block in blocks(page, *SHELL, *PYTHON))])  # fmt: skip
def test_pages_run(name: str, tmp_path: Path) -> None:
    """All blocks of a page, one after another in one folder, as a reader would."""
    for block in blocks(PAGES[name], *SHELL, *PYTHON):
        if block.how != "not run":
            run(block, tmp_path, SECONDS["slow"])
