"""Models by their Hugging Face id: the files that `load` reads, out of the local cache or downloaded into it."""

import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jaxbuf.shown import shown

DEMO = "demo"
COMPANIONS = ("generation_config.json", "tokenizer*.json", "chat_template.jinja")
WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json")
COPIES = ("consolidated*.safetensors",)  # the same weights once more, as Mistral's repositories have them
ACCEPTED = '"demo", a directory with a config.json, or a Hugging Face id "org/name" or "org/name@revision"'
ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@((?!\S*\.\.)\S+))?")


def parse_id(source: str) -> tuple[str, str | None] | None:
    """The repository and the revision (None: its main branch) of "org/name[@revision]"; None if it is no such id."""
    found = ID.fullmatch(source) if source.isprintable() else None
    return (found[1], found[2]) if found else None


def find_directory(source: str | os.PathLike[str]) -> Path | None:
    """The directory that a model's name says, that of "demo" or one that is there; None: it may be an id.

    Raises:
      ValueError: It is neither a text nor a path, or it is empty.
    """
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not isinstance(name, str) or not name:  # Path("") would be the current directory
        raise ValueError(f"a model must be {ACCEPTED}, got {shown(source)}")
    if source == DEMO:
        return Path(str(resources.files("jaxbuf.models") / DEMO))
    return Path(name) if os.path.isdir(name) else None  # Path.is_dir raises for names that are too long


def download(repository: str, revision: str | None = None, files: Sequence[str] = (*WEIGHTS, *COMPANIONS)) -> Path:
    """Brings a model's files into huggingface-hub's cache, unless they are there, and shows its progress bar.

    The cache, the account and whether the network may be used are huggingface-hub's settings: HF_HOME, HF_TOKEN,
    HF_HUB_OFFLINE.

    Args:
      repository: "org/name".
      revision: A branch, tag or commit; None: the main branch.
      files: Patterns of the files to take: configurations, the tokenizer's files, the chat template and safetensors.
        Weights that a repository has twice (`COPIES`) are taken once.

    Returns:
      The directory of the snapshot.

    Raises:
      FileNotFoundError: No such repository or revision, no access to it, or not in the cache while the Hub is out of
        reach. The message says which, and what `load` accepts.
    """
    import huggingface_hub  # half a second, and its settings are read from the environment when it is imported
    from huggingface_hub import constants, errors

    patterns = {"allow_patterns": list(files), "ignore_patterns": list(COPIES)}
    try:
        snapshot = huggingface_hub.snapshot_download(repository, revision=revision, **patterns)
    except errors.LocalEntryNotFoundError as error:
        reach = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the Hub is out of reach ({_line(error)})"
        reason, cause = f"it is not complete in the cache {constants.HF_HUB_CACHE}, and {reach}", error
    except errors.GatedRepoError as error:
        reason, cause = "it is gated: accept its terms on its page, and set HF_TOKEN to a token that may read it", error
    except errors.RepositoryNotFoundError as error:
        reason, cause = "there is no such model, or it is private and HF_TOKEN may not read it", error
    except errors.RevisionNotFoundError as error:
        reason, cause = f"the model is there, but has no revision {revision!r}", error
    except errors.HfHubHTTPError as error:
        reason, cause = f"the Hub answered: {_line(error)}", error
    except errors.HFValidationError as error:
        reason, cause = _line(error), error
    else:
        return Path(snapshot)
    asked = repository if revision is None else f"{repository}@{revision}"
    raise FileNotFoundError(
        f"no model {asked!r}: no such directory, and not to be had from Hugging Face: {reason}; expected {ACCEPTED}"
    ) from cause


def _line(error: Exception) -> str:
    """What an error says in one line; of one that only says that it fell back to the cache, what it fell back from."""
    return str(error.__cause__ or error).strip().split("\n")[0]
