"""Weights in and out: every form in which a BERT is stored, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from encoder import ModelDirectoryError, ModelSpec
from encoder.checkpoint import load_encoder, load_masked_language_model, save
from encoder.heads import LanguageModelHead
from encoder.model import Encoder
from encoder.weights import WEIGHTS_FILE

INPUT_IDS = torch.tensor([[2, 7, 9, 11, 3], [2, 5, 3, 0, 0]])
ATTENTION_MASK = INPUT_IDS > 0


@pytest.fixture
def encoder(tiny_spec: ModelSpec) -> Encoder:
    torch.manual_seed(3)
    return Encoder(tiny_spec.config).eval()


@pytest.fixture
def head(tiny_spec: ModelSpec) -> LanguageModelHead:
    torch.manual_seed(4)
    head = LanguageModelHead(tiny_spec.config).eval()
    torch.nn.init.normal_(head.bias)
    return head


@pytest.fixture
def tiny_dir(tiny_spec: ModelSpec, encoder: Encoder, head: LanguageModelHead, tmp_path: Path) -> Path:
    save(tmp_path / "tiny", tiny_spec, encoder, head)
    return tmp_path / "tiny"


def rewrite(path: Path, change: callable) -> None:
    """Change the stored tensors."""
    tensors = safetensors.numpy.load_file(path / WEIGHTS_FILE)
    safetensors.numpy.save_file(change(tensors), path / WEIGHTS_FILE)


def outputs(encoder: Encoder) -> torch.Tensor:
    return encoder(INPUT_IDS, ATTENTION_MASK)[ATTENTION_MASK]


def test_what_is_saved_is_loaded(tiny_dir: Path, encoder: Encoder, head: LanguageModelHead) -> None:
    loaded, loaded_head = load_masked_language_model(tiny_dir)
    assert torch.equal(outputs(loaded), outputs(encoder))
    word_vectors = encoder.embeddings.word.weight
    assert torch.equal(loaded_head(outputs(loaded), word_vectors), head(outputs(encoder), word_vectors))
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(outputs(load_encoder(tiny_dir)), outputs(encoder))


def test_the_tied_decoder_is_not_stored(tiny_dir: Path) -> None:
    tensors = safetensors.numpy.load_file(tiny_dir / WEIGHTS_FILE)
    assert "bert.embeddings.word_embeddings.weight" in tensors
    assert not any("decoder" in name for name in tensors)
    with safetensors.safe_open(tiny_dir / WEIGHTS_FILE, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_others_may_read_what_is_saved(tiny_dir: Path) -> None:
    """A service runs as another user than the one who trained its model."""
    umask = os.umask(0o022)
    os.umask(umask)
    for file in tiny_dir.rglob("*.*"):
        assert file.is_dir() or file.stat().st_mode & 0o777 == 0o666 & ~umask


def gamma_and_beta(tensors: Mapping) -> dict:
    names = {name: name.replace("LayerNorm.weight", "LayerNorm.gamma") for name in tensors}
    return {names[name].replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in tensors.items()}


def with_everything_else(tensors: Mapping) -> dict:
    return {
        **tensors,
        "bert.embeddings.position_ids": np.arange(23)[None],
        "bert.pooler.dense.weight": np.zeros((14, 14), np.float32),
        "cls.seq_relationship.weight": np.zeros((2, 14), np.float32),
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
    }


@pytest.mark.parametrize("change", [gamma_and_beta, with_everything_else])
def test_other_published_forms_are_loaded(tiny_dir: Path, encoder: Encoder, change: callable) -> None:
    rewrite(tiny_dir, change)
    loaded, _ = load_masked_language_model(tiny_dir)
    assert torch.equal(outputs(loaded), outputs(encoder))
    assert torch.equal(outputs(load_encoder(tiny_dir)), outputs(encoder))


def test_a_directory_without_a_head_or_a_prefix_is_loaded(
    tiny_spec: ModelSpec, encoder: Encoder, tmp_path: Path
) -> None:
    save(tmp_path / "bare", tiny_spec, encoder)
    assert "embeddings.word_embeddings.weight" in safetensors.numpy.load_file(tmp_path / "bare" / WEIGHTS_FILE)
    assert torch.equal(outputs(load_encoder(tmp_path / "bare")), outputs(encoder))
    with pytest.raises(ModelDirectoryError, match=r"lacks 5 tensors, the first of them cls\.predictions\.bias"):
        load_masked_language_model(tmp_path / "bare")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_point_type_is_read_as_float32(tiny_dir: Path, encoder: Encoder, dtype: torch.dtype) -> None:
    tensors = safetensors.torch.load_file(tiny_dir / WEIGHTS_FILE)
    safetensors.torch.save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tiny_dir / WEIGHTS_FILE)
    assert torch.equal(outputs(load_encoder(tiny_dir)), outputs(encoder.to(dtype).float()))


def test_saved_float16_is_the_rounded_model(tiny_spec: ModelSpec, encoder: Encoder, tmp_path: Path) -> None:
    save(tmp_path / "half", tiny_spec, encoder, precision="float16")
    assert torch.equal(outputs(load_encoder(tmp_path / "half")), outputs(encoder.half().float()))
    encoder.float().layers[1].feed_forward.up.weight.data[0, 0] = 1e6
    with pytest.raises(ModelDirectoryError, match=r"encoder\.layer\.1\.intermediate.* not finite in float16"):
        save(tmp_path / "too large", tiny_spec, encoder, precision="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half"]


DECODER, WORDS = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k: v for k, v in t.items() if k != QUERY},
            "lacks 1 tensors, .* encoder.layer.1.attention.self",
        ),
        (lambda t: t | {QUERY: t[QUERY][:13]}, rf"{QUERY} must have shape \(14, 14\) by the config, got \(13, 14\)"),
        (lambda t: t | {QUERY: t[QUERY].astype(np.int8)}, f"{QUERY} must be stored as F16, BF16, F32 or F64, got I8"),
        (lambda t: t | {QUERY: t[QUERY] * np.nan}, f"{QUERY} holds 196 values that are not finite"),
        (
            lambda t: t | {"bert.encoder.layer.3.output.dense.bias": t[QUERY][0]},
            "holds bert.encoder.layer.3.* no part of the model",
        ),
        (lambda t: t | {QUERY.removeprefix("bert."): t[QUERY]}, "holds encoder.layer.1.* twice"),
        (lambda t: t | {DECODER: t[QUERY]}, rf"{DECODER} must have shape \(29, 14\) by the config, got \(14, 14\)"),
        (lambda t: t | {DECODER: 2 * t[WORDS]}, f"{DECODER} must be tied to embeddings.word_embeddings.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tiny_dir: Path, change: callable, message: str) -> None:
    rewrite(tiny_dir, change)
    with pytest.raises(ModelDirectoryError, match=message):
        load_masked_language_model(tiny_dir)


def test_damaged_pickled_and_split_weights_are_refused(tiny_dir: Path) -> None:
    whole = (tiny_dir / WEIGHTS_FILE).read_bytes()
    for damaged in (b"", whole[:7], whole[: len(whole) // 2], b"\xff" * 100):
        (tiny_dir / WEIGHTS_FILE).write_bytes(damaged)
        with pytest.raises(ModelDirectoryError, match="is not a complete, readable safetensors file"):
            load_encoder(tiny_dir)
    (tiny_dir / WEIGHTS_FILE).rename(tiny_dir / "pytorch_model.bin")
    with pytest.raises(
        ModelDirectoryError, match=r"found: \['pytorch_model\.bin'\]\); pickled and split weights are not read"
    ):
        load_encoder(tiny_dir)


def test_only_known_precisions_are_saved(tiny_dir: Path, tmp_path: Path, run_python: Callable[[str], str]) -> None:
    printed = run_python(f"""
        from encoder.checkpoint import load_encoder, save
        from encoder.model_dir import read_spec
        from pathlib import Path
        path = Path({str(tiny_dir)!r})
        for precision in ("int8", "bfloat16", None):
            try:
                save({str(tmp_path / "other")!r}, read_spec(path), load_encoder(path), precision=precision)
            except ValueError as error:
                print(error)
    """)
    assert printed.splitlines() == [
        f"precision must be float32 or float16, got {each!r}" for each in ("int8", "bfloat16", None)
    ]
    assert not (tmp_path / "other").exists()


def test_settings_beside_the_tokens_stay_out_of_the_tokens(
    tiny_spec: ModelSpec, encoder: Encoder, tmp_path: Path
) -> None:
    """A truth value under special_tokens_map.json's "add_bos_token" would cost the saved model its [CLS] and [SEP]."""
    config = {**tiny_spec.tokenizer_config, "add_bos_token": False, "add_eos_token": False}
    save(tmp_path / "saved", replace(tiny_spec, tokenizer_config=config), encoder)
    tokens = json.loads((tmp_path / "saved/special_tokens_map.json").read_text())
    assert tokens == {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")}


def test_a_vocabulary_with_gaps_is_not_written_as_lines(tiny_spec: ModelSpec, encoder: Encoder, tmp_path: Path) -> None:
    save(tmp_path / "dense", tiny_spec, encoder)
    tree = json.loads(tiny_spec.tokenizer_json)
    assert (tmp_path / "dense/vocab.txt").read_text().splitlines() == list(tree["model"]["vocab"])
    tree["model"]["vocab"]["last"] = 28
    save(tmp_path / "gaps", replace(tiny_spec, tokenizer_json=json.dumps(tree)), encoder)
    assert not (tmp_path / "gaps/vocab.txt").exists()


def test_an_existing_destination_is_left_alone(tiny_spec: ModelSpec, encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelDirectoryError, match="mine must not exist yet"):
        save(tmp_path / "mine", tiny_spec, encoder)
    assert list((tmp_path / "mine").iterdir()) == []
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ModelDirectoryError, match="link must not exist yet"):
        save(tmp_path / "link", tiny_spec, encoder)


def test_weights_of_another_model_are_not_written(tiny_spec: ModelSpec, encoder: Encoder, tmp_path: Path) -> None:
    other = replace(tiny_spec, config=replace(tiny_spec.config, intermediate_size=37))
    with pytest.raises(ValueError, match=r"the spec must have the encoder's config, .*=31.* got .*=37"):
        save(tmp_path / "wrong", other, encoder)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_no_half_model(minilm_dir: Path, tmp_path: Path) -> None:
    """Killed at several moments of writing 90 MB, the destination is whole or not there."""
    code = f"""
        from pathlib import Path
        from encoder.checkpoint import load_encoder, save
        from encoder.model_dir import read_spec
        source = Path({str(minilm_dir)!r})
        spec, encoder = read_spec(source), load_encoder(source)
        print("writing", flush=True)
        for number in range(100):
            save(Path({str(tmp_path)!r}) / f"model{{number}}", spec, encoder)
    """
    for attempt in range(3):
        writer = subprocess.Popen([sys.executable, "-c", dedent(code)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.02 + 0.11 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        for model in tmp_path.glob("model*"):
            load_encoder(model)
            for file in sorted(model.rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
            model.rmdir()
