"""One tiny model for all generation tests: what costs is compiling, so everything here shares its shapes."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxbuf.models.decoder import Decoder
from jaxbuf.models.families import config_from_dict
from jaxbuf.models.language_model import LanguageModel

EOS = 256
# How often a generation compiles each: the layers are of two kinds.
PROGRAMS = {"jit(begin_prompts)": 1, "jit(read_layer)": 2, "jit(end_prompts)": 1, "jit(generate_tokens)": 1}

CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "eos_token_id": EOS,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
}


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: every byte is a token, so characters are split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


@pytest.fixture(scope="session")
def lm() -> LanguageModel:
    """A random model whose parameters are all random, norms and gates included, so that nothing is left at identity."""
    config = config_from_dict(CONFIG)
    model = Decoder(config, rngs=nnx.Rngs(0))
    leaves, tree = jax.tree.flatten(model)
    rng = np.random.default_rng(11)
    noisy = [x + jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype) for x in leaves]
    return LanguageModel(jax.tree.unflatten(tree, noisy), config, byte_tokenizer(), {}, jnp.dtype("float32"), "tiny")


@pytest.fixture
def compiled():
    """How often each program was compiled since the test began."""
    counts = collections.Counter()

    def listen(event, _, **facts):
        if event == "/jax/core/compile/backend_compile_duration" and facts.get("fun_name") in PROGRAMS:
            counts[facts["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)
