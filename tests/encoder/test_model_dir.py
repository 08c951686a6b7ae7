"""Reading a model directory: what is read, what is refused, and what the fingerprint tells apart."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from encoder import ModelDirectoryError, ModelSpec
from encoder.checkpoint import save
from encoder.model import Encoder
from encoder.model_dir import POOLING_FLAGS, fingerprint, read_config, read_spec
from encoder.weights import read_weights


@pytest.fixture
def tiny_dir(tiny_spec: ModelSpec, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    save(tmp_path / "tiny", tiny_spec, Encoder(tiny_spec.config))
    return tmp_path / "tiny"


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    write(file, {key: value for key, value in content.items() if value is not None})


def test_the_real_model_is_read(minilm_dir: Path) -> None:
    spec = read_spec(minilm_dir)
    assert (spec.config.num_hidden_layers, spec.config.hidden_size, spec.config.num_attention_heads) == (6, 384, 12)
    assert (spec.pooling, spec.normalize, spec.max_length) == ("mean", True, 256)
    assert (spec.prompts, spec.default_prompt, spec.lowercase) == ({}, None, False)


def test_what_is_written_is_read_back(tiny_dir: Path, tiny_spec: ModelSpec) -> None:
    read = read_spec(tiny_dir)
    assert json.loads(read.tokenizer_json) == json.loads(tiny_spec.tokenizer_json)
    assert read.tokenizer_config == {**tiny_spec.tokenizer_config, "model_max_length": 11}
    same = {"tokenizer_json": "", "tokenizer_config": {}}
    assert replace(read, **same) == replace(tiny_spec, **same)


class TestPooling:
    OLD: ClassVar = {"word_embedding_dimension": 14, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    NEW: ClassVar = {"embedding_dimension": 14, "pooling_mode": "mean", "include_prompt": True}

    @pytest.mark.parametrize(
        ("config", "pooling"),
        [
            (OLD, "mean"),
            (NEW, "mean"),
            (OLD | NEW, "mean"),
            ({"pooling_mode_cls_token": True}, "cls"),
            ({"pooling_mode": "cls"}, "cls"),
            ({"pooling_mode": ["cls"]}, "cls"),
            ({flag: mode == "cls" for flag, mode in POOLING_FLAGS.items()} | {"pooling_mode": "cls"}, "cls"),
        ],
    )
    def test_old_new_and_joined_forms_are_read(self, tiny_dir: Path, config: dict, pooling: str) -> None:
        write(tiny_dir / "1_Pooling/config.json", config)
        assert read_spec(tiny_dir).pooling == pooling

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, r"must be mean or cls, got \[\]"),
            ({"pooling_mode": None}, r"must be mean or cls, got \[None\]"),
            ({"pooling_mode": "max"}, r"must be mean or cls, got \['max'\]"),
            ({"pooling_mode": ["mean", "cls"]}, r"must be mean or cls, got \['mean', 'cls'\]"),
            ({"pooling_mode": 5}, r"must be mean or cls, got \[5\]"),
            ({"pooling_mode_lasttoken": True}, r"must be mean or cls, got \['lasttoken'\]"),
            (OLD | {"pooling_mode_max_tokens": True}, r"must be mean or cls, got \['mean', 'max'\]"),
            (OLD | {"pooling_mode_mean_tokens": False}, r"must be mean or cls, got \[\]"),
            (
                OLD | {"pooling_mode": "cls"},
                r"contradicts itself: pooling_mode says \['cls'\], the flags say \['mean'\]",
            ),
            (NEW | {"pooling_mode_mean_tokens": False}, r"contradicts itself: .* the flags say \[\]"),
            (NEW | {"include_prompt": False}, "include_prompt must be true, got False"),
            (NEW | {"embedding_dimension": 384}, r"embedding_dimension must be hidden_size \(14\), got 384"),
        ],
    )
    def test_what_is_missing_or_contradictory_is_refused(self, tiny_dir: Path, config: dict, message: str) -> None:
        write(tiny_dir / "1_Pooling/config.json", config)
        with pytest.raises(ModelDirectoryError, match=message):
            read_spec(tiny_dir)

    def test_a_missing_file_is_refused(self, tiny_dir: Path) -> None:
        (tiny_dir / "1_Pooling/config.json").unlink()
        with pytest.raises(
            ModelDirectoryError, match=r"must hold config\.json; .*1_Pooling/config\.json: No such file"
        ):
            read_spec(tiny_dir)


class TestModules:
    @staticmethod
    def modules(*kinds: str, prefix: str = "sentence_transformers.models.") -> list[dict]:
        paths = {"Transformer": "", "Pooling": "1_Pooling"}
        return [{"type": prefix + kind, "path": paths.get(kind, f"{n}_{kind}")} for n, kind in enumerate(kinds)]

    def test_old_and_new_type_paths_are_read(self, tiny_dir: Path) -> None:
        for prefix in ("sentence_transformers.models.", "sentence_transformers.base.modules.transformer."):
            write(tiny_dir / "modules.json", self.modules("Transformer", "Pooling", prefix=prefix))
            assert not read_spec(tiny_dir).normalize
            write(tiny_dir / "modules.json", self.modules("Transformer", "Pooling", "Normalize", prefix=prefix))
            assert read_spec(tiny_dir).normalize

    def test_a_plain_bert_directory_is_refused_as_a_sentence_encoder(self, tiny_dir: Path) -> None:
        (tiny_dir / "modules.json").unlink()
        with pytest.raises(ModelDirectoryError, match=r"no modules\.json, so nothing says how"):
            read_spec(tiny_dir)

    @pytest.mark.parametrize("kinds", [["Transformer"], ["Transformer", "Pooling", "Dense"], ["Pooling"], []])
    def test_other_modules_are_refused(self, tiny_dir: Path, kinds: list[str]) -> None:
        write(tiny_dir / "modules.json", self.modules(*kinds))
        with pytest.raises(ModelDirectoryError, match=re.escape(f"optionally Normalize, got {kinds}")):
            read_spec(tiny_dir)

    @pytest.mark.parametrize("content", [{}, [1], [{"type": "Transformer"}], [{"type": 1, "path": ""}]])
    def test_damaged_modules_are_refused(self, tiny_dir: Path, content: Any) -> None:
        write(tiny_dir / "modules.json", content)
        with pytest.raises(ModelDirectoryError, match=r"modules\.json must (hold a JSON list|have a type and a path)"):
            read_spec(tiny_dir)

    def test_a_transformer_in_a_folder_of_its_own_is_refused(self, tiny_dir: Path) -> None:
        modules = self.modules("Transformer", "Pooling")
        modules[0]["path"] = "0_Transformer"
        write(tiny_dir / "modules.json", modules)
        with pytest.raises(ModelDirectoryError, match=r"must lie in .* itself and a folder in it, got 0_Transformer"):
            read_spec(tiny_dir)

    @pytest.mark.parametrize(
        "kind", ["custom.Pooling", "sentence_transformers.sparse_encoder.modules.Pooling", "Pooling"]
    )
    def test_namesakes_from_elsewhere_are_refused(self, tiny_dir: Path, kind: str) -> None:
        modules = self.modules("Transformer", "Pooling")
        modules[1]["type"] = kind
        write(tiny_dir / "modules.json", modules)
        with pytest.raises(ModelDirectoryError, match="optionally Normalize, got"):
            read_spec(tiny_dir)

    @pytest.mark.parametrize("folder", ["../1_Pooling", "/1_Pooling", "1_Pooling/../1_Pooling", ".."])
    def test_folders_elsewhere_are_refused(self, tiny_dir: Path, folder: str) -> None:
        modules = self.modules("Transformer", "Pooling")
        modules[1]["path"] = folder
        write(tiny_dir / "modules.json", modules)
        with pytest.raises(ModelDirectoryError, match="must lie in"):
            read_spec(tiny_dir)

    def test_folders_are_taken_by_their_own_name(self, tiny_dir: Path) -> None:
        modules = self.modules("Transformer", "Pooling")
        modules[1]["path"] = "./.pool"
        write(tiny_dir / "modules.json", modules)
        (tiny_dir / ".pool").mkdir()
        (tiny_dir / "pool").mkdir()
        write(tiny_dir / ".pool/config.json", {"pooling_mode": "cls"})
        write(tiny_dir / "pool/config.json", {"pooling_mode": "mean"})
        assert read_spec(tiny_dir).pooling == "cls"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "tokenizer_config.json",
            {"do_lower_case": False},
            "do_lower_case contradicts itself: True in .*, False beside",
        ),
        ("tokenizer_config.json", {"do_lower_case": None, "tokenizer_class": "BertTokenizerFast"}, None),
        (
            "tokenizer_config.json",
            {"strip_accents": None},
            "strip_accents contradicts itself: False in .*, None beside",
        ),
        ("tokenizer_config.json", {"tokenize_chinese_chars": False}, "tokenize_chinese_chars contradicts itself"),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "do_lower_case contradicts itself: None in"),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}, None),
        ("tokenizer_config.json", {"tokenizer_class": None, "strip_accents": None}, "strip_accents contradicts itself"),
        ("tokenizer_config.json", {"truncation_side": "left"}, "truncation must be on the right"),
        ("tokenizer.json", {"truncation": {"direction": "Left"}}, "truncation must be on the right"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens must be false"),
        ("sentence_bert_config.json", {"do_lower_case": "true"}, "do_lower_case must be true or false, got 'true'"),
        ("sentence_bert_config.json", {"config_args": {"num_hidden_layers": 1}}, "not computed here: config_args"),
        (
            "sentence_bert_config.json",
            {"processor_kwargs": {"model_max_length": 7}},
            "not computed here: processor_kwargs",
        ),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "not computed here: another task"),
        (
            "config_sentence_transformers.json",
            {"model_type": "SparseEncoder"},
            "must be SentenceTransformer, got 'Sparse",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": []}, "default_prompt_name be a name"),
    ],
)
def test_settings_that_would_change_the_vectors_are_refused(
    tiny_dir: Path, file: str, changes: dict, message: str | None
) -> None:
    """sentence-transformers honours each of these; to pass over one would give other vectors than it."""
    edit(tiny_dir / file, **changes)
    if message is None:
        read_spec(tiny_dir)
        return
    with pytest.raises(ModelDirectoryError, match=message):
        read_spec(tiny_dir)


@pytest.mark.parametrize("name", ["sentence_roberta_config.json", "adapter_config.json"])
def test_files_that_would_change_the_model_are_refused(tiny_dir: Path, name: str) -> None:
    write(tiny_dir / name, {"max_seq_length": 8})
    with pytest.raises(ModelDirectoryError, match=f"not computed here: {name}"):
        read_spec(tiny_dir)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "config_sentence_transformers.json"])
def test_a_link_to_nowhere_is_damage_not_absence(tiny_dir: Path, name: str) -> None:
    (tiny_dir / name).unlink()
    (tiny_dir / name).symlink_to(tiny_dir / "pruned")
    with pytest.raises(ModelDirectoryError, match=f"must hold {name}"):
        read_spec(tiny_dir)


class TestMaxLength:
    def test_the_tokenizers_limit_stands_in_for_a_missing_one(self, tiny_dir: Path) -> None:
        write(tiny_dir / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
        edit(tiny_dir / "tokenizer_config.json", model_max_length=9)
        assert read_spec(tiny_dir).max_length == 9
        edit(tiny_dir / "tokenizer_config.json", model_max_length=10**30)
        assert read_spec(tiny_dir).max_length == 23
        (tiny_dir / "sentence_bert_config.json").unlink()
        edit(tiny_dir / "tokenizer_config.json", model_max_length=None)
        assert read_spec(tiny_dir).max_length == 23

    @pytest.mark.parametrize("length", [24, 2, 0, -1, True, 11.0, "11"])
    def test_an_impossible_length_is_refused(self, tiny_dir: Path, length: Any) -> None:
        edit(tiny_dir / "sentence_bert_config.json", max_seq_length=length)
        rule = r"in \[3, 23 positions\]" if type(length) is int else "a whole number"
        with pytest.raises(ModelDirectoryError, match=f"must be {rule}, got {length!r}"):
            read_spec(tiny_dir)


@pytest.mark.parametrize(
    ("prompts", "default", "message"),
    [
        ({"query": "q: "}, "passage", r"default_prompt_name must be in \['query'\], got 'passage'"),
        ({}, "query", r"default_prompt_name must be in \[\], got 'query'"),
        ({"query": 5}, None, "prompts must map names to texts"),
        ({"query": "q: "}, ["query"], "default_prompt_name be a name"),
        (["query"], None, "prompts must map names to texts"),
    ],
)
def test_impossible_prompts_are_refused(tiny_dir: Path, prompts: Any, default: str | None, message: str) -> None:
    write(tiny_dir / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default})
    with pytest.raises(ModelDirectoryError, match=message):
        read_spec(tiny_dir)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "modules.json"])
def test_a_missing_or_damaged_file_is_named(tiny_dir: Path, name: str) -> None:
    deep = b"[" * 100_000
    for content, message in (
        (b"{", "is not"),
        (b'"\xff"', "is not"),
        (b"5", "must hold"),
        (deep, "is not JSON in UTF-8"),
    ):
        (tiny_dir / name).write_bytes(content)
        with pytest.raises(ModelDirectoryError, match=f"{name} {message}"):
            read_spec(tiny_dir)
    (tiny_dir / name).unlink()
    with pytest.raises(ModelDirectoryError, match=name):
        read_spec(tiny_dir)


def test_no_directory_at_all_is_a_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(ModelDirectoryError, match=r"must hold config\.json"):
            read_config(path)


class TestFingerprint:
    def of(self, path: Path) -> str:
        spec = read_spec(path)
        return fingerprint(spec, read_weights(path, spec.config))

    def test_is_the_same_however_the_model_is_stored(
        self, tiny_dir: Path, tiny_spec: ModelSpec, tmp_path: Path
    ) -> None:
        before = self.of(tiny_dir)
        for name in ("config.json", "tokenizer.json"):  # another order of keys
            content = json.loads((tiny_dir / name).read_text())
            write(tiny_dir / name, dict(reversed(content.items())))
        edit(tiny_dir / "config.json", hidden_dropout_prob=0.3, transformers_version="9", architectures=None)
        write(tiny_dir / "config_sentence_transformers.json", {"prompts": {"query": "the pizza "}})
        edit(tiny_dir / "tokenizer.json", truncation={"max_length": 5}, padding={})
        assert self.of(tiny_dir) == before

        torch.manual_seed(3)
        encoder = Encoder(tiny_spec.config).half().float()
        for precision in ("float32", "float16"):
            save(tmp_path / precision, tiny_spec, encoder, precision=precision)
        assert self.of(tmp_path / "float32") == self.of(tmp_path / "float16") != before

    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("config.json", {"num_attention_heads": 7}),
            ("config.json", {"layer_norm_eps": 1e-5}),
            ("sentence_bert_config.json", {"max_seq_length": 10}),
            ("sentence_bert_config.json", {"do_lower_case": True}),
            ("config_sentence_transformers.json", {"prompts": {"query": "a pizza "}}),
            ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
            ("tokenizer.json", {"decoder": {"type": "Fuse"}}),
            ("1_Pooling/config.json", {"pooling_mode": "cls", **dict.fromkeys(POOLING_FLAGS)}),
        ],
    )
    def test_changes_with_all_that_decides_an_embedding(self, tiny_dir: Path, name: str, changes: dict) -> None:
        before = self.of(tiny_dir)
        edit(tiny_dir / name, **changes)
        assert self.of(tiny_dir) != before

    def test_changes_with_each_weight(self, tiny_dir: Path) -> None:
        spec = read_spec(tiny_dir)
        weights = read_weights(tiny_dir, spec.config)
        seen = {fingerprint(spec, weights)}
        for name, weight in weights.items():
            changed = weight.copy()
            changed.flat[-1] = np.nextafter(changed.flat[-1], np.float32(2))
            seen.add(fingerprint(spec, weights | {name: changed}))
        assert len(seen) == 1 + len(weights)

    def test_is_known_for_the_real_model(self, minilm_dir: Path) -> None:
        """A change here severs every stored collection from its model: it must be meant."""
        assert self.of(minilm_dir) == "f4336d84dd02e559b91eb16c366e77da3f889cc248ab330481ef5969e1a41d5e"


def test_the_directory_may_stand_anywhere(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path / "with space" / "ünï")
    assert read_spec(tmp_path / "with space" / "ünï") == read_spec(tiny_dir)
