"""Gates of a language model: given to its softmax layers, taken away, saved and loaded apart from the model.

A file of gates is a safetensors file with the scores' parameters. Its metadata has the settings (which score, window
and threshold) and the identity of the model that they were made for.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxbuf.attention.gated_pages import WhenFull
from jaxbuf.attention.selection import Selection
from jaxbuf.axes import Array, Int
from jaxbuf.models.admission import Admission, BorrowedNeuron, HeadScore, HiddenScore, Rule, Score, WriteGate
from jaxbuf.models.config import LayerConfig, Mixer, ModelConfig
from jaxbuf.models.decoder import Decoder, forward_with_gates
from jaxbuf.models.language_model import LanguageModel
from jaxbuf.models.layers import named_parameters, replace_parameters
from jaxbuf.models.loading.fields import CheckpointError
from jaxbuf.models.mixers.attention import Attention
from jaxbuf.shown import shown

FORMAT = "jaxbuf gates 1"
DEMO = Path(__file__).parent / "demo" / "gates.safetensors"  # those of the embedded model
SCORES: dict[str, type] = {
    "write_gate": WriteGate,
    "hidden": HiddenScore,
    "head": HeadScore,
    "neuron": BorrowedNeuron,
    "rule": Rule,
}
STRIDE = 997  # of the numbers of a key projection that a model's identity is made of


def with_gates(lm: LanguageModel, admission: Admission, *, seed: int = 0) -> LanguageModel:
    """The model whose softmax layers have such an admission, with new parameters of its score.

    Args:
      lm: Its own parameters are not copied. Gates that it has are dropped.
      admission: Of every softmax layer with keys and values; the multi-token-prediction layer has none.
      seed: Of the new parameters, and, of a random rule, of its draws.

    Raises:
      ValueError: The model has no such layer, or is spread over a mesh.
    """
    if lm.config.mesh is not None:
        raise ValueError("lm must lie on one device to have gates, got one that is spread over a mesh")
    config = gated_config(lm.config, admission)
    if not gated_layers(config):
        raise ValueError(f"lm must have softmax layers with keys and values to be gated, got {lm!r}")
    values = {}
    for place, mixer in gated_layers(config).items():
        new = admission.score.parameters(
            config.hidden_size, mixer.kv_heads, mixer.head_dim, rngs=nnx.Rngs(_folded(seed, place))
        )
        if new is not None:
            values |= {f"{_path(place)}.{name}": param[...] for name, param in named_parameters(new).items()}
    return _rebuilt(lm, config, values)


def gated_config(config: ModelConfig, admission: Admission) -> ModelConfig:
    """The configuration of a model whose softmax layers with keys and values have such an admission."""
    return _changed(config, lambda place: _of_layer(admission, place))


def without_gates(lm: LanguageModel) -> LanguageModel:
    """The model as it was before it had gates."""
    return _rebuilt(lm, _changed(lm.config, lambda place: None))


def with_threshold(lm: LanguageModel, threshold: float | None) -> LanguageModel:
    """The model with the same gates and another threshold; None: soft, as in training.

    Raises:
      ValueError: The model has no gates.
    """
    return _with_rule(lm, threshold=threshold)


def with_room(lm: LanguageModel, *, keep: float = 1.0, when_full: WhenFull = "evict") -> LanguageModel:
    """The model with the same gates, whose caches have pages for a share of the keys behind the window.

    Args:
      lm: With gates.
      keep, when_full: As in `jaxbuf.models.admission.Admission`: with "evict" and "raise" each request has room for
        that share of its capacity in each layer, with "rest" all of a cache's requests together have.

    Raises:
      ValueError: The model has no gates, or one of them is out of range.
    """
    return _with_rule(lm, keep=keep, when_full=when_full)


def admission_of(lm: LanguageModel) -> Admission:
    """What the model's gated layers have.

    Raises:
      ValueError: It has no gates.
    """
    for mixer in gated_layers(lm.config).values():
        assert mixer.admission is not None
        return mixer.admission
    raise ValueError(f"lm must have gates, got {lm!r} without: load them with jaxbuf.load({lm.name!r}, gates=...)")


def gated_layers(config: ModelConfig) -> dict[tuple[int, int], Attention]:
    """The mixers that have an admission, by the number of their layer and their place in it."""
    return {
        (number, place): mixer
        for number, layer in enumerate(config.layers)
        for place, mixer in enumerate(layer.mixers)
        if isinstance(mixer, Attention) and mixer.admission is not None
    }


def gate_parameters(model: Decoder) -> dict[str, nnx.Param]:
    """The parameters of all scores, by their paths."""
    prefixes = tuple(f"{_path(place)}." for place in gated_layers(model.config))
    return {path: param for path, param in named_parameters(model).items() if path.startswith(prefixes)}


def kept_shares(lm: LanguageModel, tokens: Int[Array, "batch time"] | np.ndarray) -> np.ndarray:
    """The share of keys that each gated layer's heads keep behind their windows: float64 [layers, kv_heads].

    Args:
      lm: With gates that have a threshold.
      tokens: Whole sequences.

    Raises:
      ValueError: The model has no gates, or they are soft.
    """
    return np.mean(kept_keys(lm, tokens), axis=(1, 2))


def kept_keys(lm: LanguageModel, tokens: Int[Array, "batch time"] | np.ndarray) -> np.ndarray:
    """Which keys each gated layer's heads keep behind their windows: bool [layers, batch, time, kv_heads].

    Args:
      lm: With gates that have a threshold.
      tokens: Whole sequences.

    Raises:
      ValueError: The model has no gates, or they are soft.
    """
    threshold = admission_of(lm).threshold
    if threshold is None:
        raise ValueError("lm must have gates with a threshold, got soft ones")
    return key_scores(lm, tokens) >= threshold


def key_scores(lm: LanguageModel, tokens: Int[Array, "batch time"] | np.ndarray) -> np.ndarray:
    """The score of every key: float32 [layers, batch, time, kv_heads].

    Args:
      lm: With gates.
      tokens: Whole sequences.

    Raises:
      ValueError: The model has no gates.
    """
    admission_of(lm)
    return np.asarray(_forward(lm.model, jnp.asarray(tokens, jnp.int32)))


def threshold_for_share(
    lm: LanguageModel, share: float, tokens: Int[Array, "batch time"] | np.ndarray | None = None
) -> float:
    """The highest threshold that a share of all layers' scores reaches, for `with_threshold`.

    Args:
      lm: With gates.
      share: In [0, 1], rounded to whole heads or keys. Scores equal to the threshold are kept, too. Heads whose number
        is 1 are always kept, and so are first tokens, whose score is 1.
      tokens: Whole sequences, whose keys are counted. None: heads are, which needs a `HeadScore`.

    Raises:
      ValueError: The model has no gates, share is out of range, or tokens is None and keys have scores of their own.

    Source: DuoAttention (2024), section 2.4: the quantile is over all heads of all layers.
    """
    score = admission_of(lm).score
    _check_share(share)
    if tokens is not None:
        scores = key_scores(lm, tokens)
    elif isinstance(score, HeadScore):
        scores = np.concatenate([np.asarray(param[...]) for param in gate_parameters(lm.model).values()])
    else:
        raise ValueError(f"tokens must be sequences where each key has its own score ({score!r}), got None")
    return threshold_of(scores, share)


def threshold_of(scores: np.ndarray, share: float) -> float:
    """The highest threshold that a share of scores reaches, see `threshold_for_share`.

    Args:
      scores: Of keys, as `key_scores` returns them, or of heads.
      share: In [0, 1].

    Raises:
      ValueError: share is out of range.
    """
    _check_share(share)
    ordered = np.sort(np.clip(scores.astype(np.float32), 0, 1), axis=None)[::-1]
    kept = round(share * ordered.size)
    if kept == 0:
        return min(1.0, float(np.nextafter(ordered[0], np.float32(2))))
    return float(ordered[kept - 1])


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share!r}")


def with_selection(lm: LanguageModel, selection: Selection | None) -> LanguageModel:
    """The model whose softmax layers with keys and values read what a selection says, of what gates keep if it has any.

    `logits` and `score` of it serve every selection; a memory, and with it `generate`, serves a `Quest` of a model
    without gates, whose page_size is the memory's and whose `behind` is at least the tokens of a launch.

    Args:
      lm: A selection that it has is replaced.
      selection: Of all these layers but the first `dense` ones; None: every layer reads everything.

    Raises:
      ValueError: The model has no such layer, or is spread over a mesh.
    """
    if lm.config.mesh is not None and selection is not None:
        raise ValueError("lm must lie on one device to select what it reads, got one that is spread over a mesh")
    places = [
        (number, place)
        for number, layer in enumerate(lm.config.layers)
        for place, mixer in enumerate(layer.mixers)
        if isinstance(mixer, Attention)
    ]
    if not places:
        raise ValueError(f"lm must have softmax layers with keys and values to select from, got {lm!r}")
    selecting = set(places[0 if selection is None else selection.dense :])
    return _rebuilt(lm, _changed(lm.config, lambda place: selection if place in selecting else None, "selection"))


def with_idle_neurons(lm: LanguageModel) -> LanguageModel:
    """The model with zeros in the channels that scores borrow, so that every key starts with the same score.

    Args:
      lm: With gates; of scores that borrow no channel it is returned as it is.

    Raises:
      ValueError: The model has no gates.
    """
    borrows = admission_of(lm).score.terms.borrows
    if borrows is None:
        return lm
    values, held = {}, named_parameters(lm.model)
    for (number, place), mixer in gated_layers(lm.config).items():
        name, group = ("q", mixer.heads // mixer.kv_heads) if borrows == "query" else ("k", 1)
        apart = mixer.head_dim * (2 if name == "q" and mixer.gate else 1)  # rows from a head to the next
        rows = np.arange(mixer.kv_heads) * group * apart + mixer.head_dim - 1
        for part in ("proj", "bias"):
            path = f"layers.{number}.mixers.{place}.{name}_{part}"
            if path in held:
                values[path] = held[path][...].at[rows].set(0)
    return _rebuilt(lm, lm.config, values)


@jax.jit
def _forward(model: Decoder, tokens: Array) -> Array:
    return forward_with_gates(model, tokens)[1]


def save_gates(lm: LanguageModel, path: str | Path) -> None:
    """Writes the model's gates to a safetensors file, which `load_gates` reads; it takes its name when it is whole.

    Args:
      lm: The model, of which nothing else is written.
      path: Of the file.

    Raises:
      ValueError: The model has no gates.
      FileNotFoundError: The file's directory is not there.
    """
    first = admission_of(lm)
    layers = gated_layers(lm.config)
    described = {
        "format": FORMAT,
        "model": lm.name,
        "identity": identity(lm),
        "window": first.window,
        "threshold": first.threshold,
        "scores": {_path(place): _described(mixer.admission.score) for place, mixer in layers.items()},  # pyright: ignore[reportOptionalMemberAccess]
    }
    tensors = {name: np.asarray(param[...]) for name, param in gate_parameters(lm.model).items()}
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.saving")
    try:
        save_file(tensors, new, metadata={"jaxbuf": json.dumps(described)})
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def load_gates(lm: LanguageModel, path: str | Path) -> LanguageModel:
    """The model with the gates of a file from `save_gates`.

    Args:
      lm: The model; gates that it has are dropped.
      path: Of the file; "demo": those of the embedded model, which are in the package.

    Raises:
      FileNotFoundError: There is no such file.
      CheckpointError: It is no file of gates, or it is of another model; the message says of which.
      ValueError: The model is spread over a mesh.
    """
    path = DEMO if str(path) == "demo" else Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no gates at {shown(str(path))}: expected a file that jaxbuf train-gate wrote")
    if lm.config.mesh is not None:
        raise ValueError("mesh must be None where gates are given: their lists lie on one device")
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {}).get("jaxbuf", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a file of gates: {error}") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise CheckpointError(f"{path} must be a file of gates ({FORMAT}), got another safetensors file")
    if described["identity"] != identity(lm):
        raise CheckpointError(
            f"{path} has gates of another model, made for {described['model']!r}; they do not fit {lm.name!r}: train "
            "some for it with jaxbuf train-gate"
        )
    scores = {name: _score(given, path) for name, given in described["scores"].items()}

    def of_layer(place: tuple[int, int]) -> Admission | None:
        score = scores.get(_path(place))
        return None if score is None else Admission(score, described["window"], described["threshold"])

    lm = without_gates(lm)
    config, held = _changed(lm.config, of_layer), named_parameters(lm.model)
    expected = {name for name in named_parameters(_abstract(config)) if name not in held}
    if expected != tensors.keys():
        wrong = sorted(expected ^ tensors.keys())
        raise CheckpointError(f"{path} has other tensors than its settings say: {', '.join(wrong[:3])}")
    return _rebuilt(lm, config, {name: jnp.asarray(tensor) for name, tensor in tensors.items()})


def identity(lm: LanguageModel) -> str:
    """What tells a model from others, whatever dtype it was loaded in: of its key projections, rounded to bfloat16."""
    found = hashlib.sha256()
    for path, param in named_parameters(lm.model).items():
        if path.endswith("k_proj"):
            sample = param[...].reshape(-1)[::STRIDE].astype(jnp.bfloat16)
            found.update(f"{path} {param[...].shape} ".encode())
            found.update(np.asarray(sample).view(np.uint16).tobytes())
    return found.hexdigest()


def _path(place: tuple[int, int]) -> str:
    return f"layers.{place[0]}.mixers.{place[1]}.admission"


def _folded(seed: int, place: tuple[int, int]) -> int:
    return (seed * 1_000_003 + place[0] * 97 + place[1]) % 2**31


def _of_layer(admission: Admission, place: tuple[int, int]) -> Admission:
    """The admission of one layer: random rules differ from layer to layer."""
    score = admission.score
    if isinstance(score, Rule) and score.keeps == "random":
        return dataclasses.replace(admission, score=dataclasses.replace(score, seed=_folded(score.seed, place)))
    return admission


def _with_rule(lm: LanguageModel, **changes: Any) -> LanguageModel:
    """The model whose admissions differ in that; ValueError where it has none."""
    admission_of(lm)
    layers = gated_layers(lm.config)

    def of_layer(place: tuple[int, int]) -> Admission | None:
        found = layers[place].admission if place in layers else None
        return None if found is None else dataclasses.replace(found, **changes)

    return _rebuilt(lm, _changed(lm.config, of_layer))


def _changed(config: ModelConfig, of_layer: Callable[[tuple[int, int]], Any], field: str = "admission") -> ModelConfig:
    """The configuration whose softmax mixers have in this field what `of_layer` says."""

    def mixer(number: int, place: int, given: Mixer) -> Mixer:
        if not isinstance(given, Attention):
            return given
        return dataclasses.replace(given, **{field: of_layer((number, place))})

    def layer(number: int, given: LayerConfig) -> LayerConfig:
        mixers = tuple(mixer(number, place, each) for place, each in enumerate(given.mixers))
        return dataclasses.replace(given, mixers=mixers)

    return dataclasses.replace(config, layers=tuple(layer(number, each) for number, each in enumerate(config.layers)))


def _abstract(config: ModelConfig) -> Decoder:
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def _rebuilt(lm: LanguageModel, config: ModelConfig, values: Mapping[str, Array] | None = None) -> LanguageModel:
    """The language model of another configuration, with these values of its parameters, and its own of the others."""
    held = {path: param[...] for path, param in named_parameters(lm.model).items()} | dict(values or {})
    abstract = _abstract(config)
    model = replace_parameters(abstract, [held[path] for path in named_parameters(abstract)])
    return dataclasses.replace(lm, model=model, config=config)


def _described(score: Score) -> dict[str, Any]:
    name = next(name for name, kind in SCORES.items() if isinstance(score, kind))
    return {"score": name} | dataclasses.asdict(score)  # pyright: ignore[reportArgumentType]


def _score(given: dict[str, Any], path: Path) -> Score:
    fields = dict(given)
    name = fields.pop("score", None)
    if name not in SCORES:
        raise CheckpointError(f"{path} has scores of a kind that is not known: {shown(name)}; update jaxbuf")
    return SCORES[name](**fields)
