"""The texts that measurements read: files, this Python's standard library as code, and logs that a seed makes up."""

import argparse
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxbuf.bench import report
from jaxbuf.models.language_model import LanguageModel

type Kind = Literal["text", "code", "logs"]

KINDS: tuple[Kind, ...] = ("text", "code", "logs")
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENT_BREAK = "\f"
WINDOW = 512
LOGS, LINES = 40, 200  # log files, and lines of each


def add_text(parser: argparse.ArgumentParser, default: str = f"the repository's {', '.join(TEXTS)}") -> None:
    """Adds the option --text; `default` says what is read without it."""
    parser.add_argument("--text", type=Path, nargs="+", help=f"files; default: {default}")


def check_text(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Gives --text its default, and ends the program with one line if a file is not there."""
    options.text = options.text or [report.ROOT / name for name in TEXTS if (report.ROOT / name).is_file()]
    if not options.text:
        parser.error(f"--text must name files: {', '.join(TEXTS)} of the repository are not here")
    if missing := [str(path) for path in options.text if not path.is_file()]:
        parser.error(f"--text must name files, there is no {missing[0]}")


def text_record(files: Sequence[Path]) -> list[dict[str, Any]]:
    """What a record tells about the files: never their text."""
    return [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in files
    ]


def read_documents(lm: LanguageModel, files: Sequence[Path]) -> list[list[int]]:
    """The tokens of every document of the files, in order; ValueError names a file that is not UTF-8."""
    texts = [text for path in files for text in _read(path).split(DOCUMENT_BREAK)]
    return [lm.encode(text.removeprefix("\n")) for text in texts if text.strip()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text must name files in UTF-8, got {path}: {error}") from error


def documents_of(
    lm: LanguageModel, kind: Kind, files: Sequence[Path], seed: int
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The tokens of every document of a kind, and what a record tells about them.

    Args:
      lm: With a tokenizer.
      kind: "text" are the files, "code" the modules at the top of this Python's standard library, "logs" made up.
      files: For "text".
      seed: For "logs".
    """
    if kind == "text":
        return read_documents(lm, files), text_record(files)
    if kind == "code":
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts, name = [path.read_text(encoding="utf-8") for path in modules], "the Python standard library"
    else:
        texts, name = list(make_logs(seed)), f"logs of seed {seed}"
    content = DOCUMENT_BREAK.join(texts).encode()
    told = {"file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return [lm.encode(text) for text in texts if text.strip()], [told]


def make_logs(seed: int) -> Iterator[str]:
    """LOGS texts of LINES lines, each of a web server, a system's daemons, a service or a build in turn.

    Times rise, and what varies (clients, paths, numbers) comes from pools of the sizes that such files have.
    """
    rng = np.random.default_rng(seed)
    for number in range(LOGS):
        yield "".join(f"{line}\n" for line in (_web, _system, _service, _build)[number % 4](rng))


def _times(rng: np.random.Generator, mean: float) -> Iterator[datetime]:
    now = datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=float(rng.integers(0, 31_000_000)))
    for _ in range(LINES):
        now += timedelta(seconds=float(rng.exponential(mean)))
        yield now


def _web(rng: np.random.Generator) -> Iterator[str]:
    clients = [".".join(map(str, rng.integers(1, 255, 4))) for _ in range(12)]
    paths = [
        f"/{area}/{name}" for area in ("api/v1", "static", "docs") for name in ("users", "items", "index", "login")
    ]
    agents = ["curl/8.5.0", "Mozilla/5.0 (X11; Linux x86_64; rv:121.0) Gecko/20100101 Firefox/121.0"]
    for now in _times(rng, 2.0):
        client, path, agent = rng.choice(clients), rng.choice(paths), rng.choice(agents)
        status = rng.choice([200, 200, 200, 304, 404, 500])
        when = now.strftime("%d/%b/%Y:%H:%M:%S +0000")
        yield f'{client} - - [{when}] "GET {path} HTTP/1.1" {status} {rng.integers(100, 9000)} "-" "{agent}"'


def _system(rng: np.random.Generator) -> Iterator[str]:
    host, process = f"node{rng.integers(1, 40)}", rng.integers(300, 30_000, 4)
    for now in _times(rng, 20.0):
        user, address = rng.choice(["root", "admin", "deploy", "backup"]), ".".join(map(str, rng.integers(1, 255, 4)))
        message = rng.choice(
            [
                f"sshd[{process[0]}]: Failed password for {user} from {address} port {rng.integers(1024, 65_535)} ssh2",
                f"sshd[{process[0]}]: Connection closed by authenticating user {user} {address} [preauth]",
                f"CRON[{process[1]}]: ({user}) CMD (test -x /usr/sbin/anacron || run-parts --report /etc/cron.hourly)",
                f"systemd[1]: Started Session {rng.integers(1, 900)} of user {user}.",
                f"kernel: [{rng.integers(1000, 99_999)}.{rng.integers(100_000, 999_999)}] eth0: link becomes ready",
            ]
        )
        yield f"{now.strftime('%b %d %H:%M:%S')} {host} {message}"


def _service(rng: np.random.Generator) -> Iterator[str]:
    names = ["scheduler", "database.pool", "http.server", "cache"]
    for now in _times(rng, 0.5):
        level, job = rng.choice(["INFO", "INFO", "INFO", "DEBUG", "WARNING", "ERROR"]), rng.integers(1, 500)
        message = rng.choice(
            [
                f"job {job} finished in {rng.integers(1, 900)} ms, status=ok, retries=0",
                f"connection {job % 16} returned to the pool, {rng.integers(0, 16)} in use",
                f"request id={rng.integers(10**6):06d} method=POST path=/jobs/{job} status=201",
                f"key jobs:{job} not found, loading it from the database",
            ]
        )
        when = f"{now.strftime('%Y-%m-%d %H:%M:%S')},{now.microsecond // 1000:03d}"
        yield f"{when} {level} [{rng.choice(names)}] {message}"


def _build(rng: np.random.Generator) -> Iterator[str]:
    modules = ["parser", "lexer", "codegen", "runtime", "linker", "driver"]
    for number in range(1, LINES + 1):
        module, part = rng.choice(modules), rng.choice(["main", "util", "table", "stream", "error", "types"])
        yield rng.choice(
            [
                f"[{number}/{LINES}] Building CXX object src/{module}/CMakeFiles/{module}.dir/{part}.cpp.o",
                f"[{number}/{LINES}] Linking CXX static library lib/lib{module}.a",
                f"src/{module}/{part}.cpp:{rng.integers(10, 900)}:{rng.integers(1, 80)}: warning: unused variable 'i' "
                "[-Wunused-variable]",
                f"tests/{module}/test_{part}.py::test_{rng.choice(['empty', 'large', 'nested'])} PASSED",
            ]
        )


def cut_windows(lm: LanguageModel, documents: Sequence[Sequence[int]], tokens: int) -> np.ndarray:
    """int32 [windows, WINDOW], at least `tokens` if there are as many: the documents one after another, each closed by
    the model's end token, and of these the windows that are evenly spread over them.
    """
    end = sorted(lm.stop_ids)[:1]
    stream = np.asarray([token for document in documents for token in [*document, *end]], np.int32)
    window = max(1, min(WINDOW, len(stream), tokens))
    windows = stream[: len(stream) // window * window].reshape(-1, window)
    number = min(len(windows), -(-tokens // window))
    return windows[np.arange(number) * len(windows) // max(number, 1)]


def cut_prompts(documents: Sequence[Sequence[int]], number: int, length: int, seed: int) -> list[list[int]]:
    """`number` prompts of `length` tokens, each inside one document, from places that are drawn with the seed.

    Raises:
      ValueError: No document is so long.
    """
    starts = [(document, place) for document in documents for place in range(len(document) - length + 1)]
    if not starts:
        longest = max(map(len, documents), default=0)
        raise ValueError(f"--prompt-tokens must be at most the longest document's ({longest}), got {length}")
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(starts), number, replace=number > len(starts))
    return [list(document[place : place + length]) for document, place in (starts[i] for i in chosen)]
