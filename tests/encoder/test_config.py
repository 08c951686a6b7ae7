import json

import pytest

from encoder import EncoderConfig, ModelDirectoryError

SIZES = {
    "vocab_size": 37,
    "hidden_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 41,
    "max_position_embeddings": 29,
}


def test_round_trip_through_json() -> None:
    config = EncoderConfig(**SIZES, type_vocab_size=5, layer_norm_eps=1e-7, pad_token_id=3)
    assert EncoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_what_the_first_bert_files_leave_out_has_berts_published_value() -> None:
    config = EncoderConfig.from_dict(SIZES | {"hidden_act": "gelu", "initializer_range": None})
    assert (config.layer_norm_eps, config.type_vocab_size, config.pad_token_id) == (1e-12, 2, 0)
    assert config.initializer_range == 0.02


@pytest.mark.parametrize("name", ["xlm-roberta", "roberta", "distilbert", "modernbert", "new", "nomic_bert", "mpnet"])
def test_another_architecture_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelDirectoryError, match=f"model_type must be 'bert', got '{name}'"):
        EncoderConfig.from_dict(SIZES | {"model_type": name})


def test_a_classifier_is_refused_rather_than_losing_its_head() -> None:
    with pytest.raises(ModelDirectoryError, match="got 'BertForSequenceClassification'"):
        EncoderConfig.from_dict(SIZES | {"architectures": ["BertForSequenceClassification"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act must be 'gelu', got 'relu'"),
        ({"hidden_act": None}, "hidden_act must be 'gelu', got None"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute'"),
        ({"is_decoder": True}, "is_decoder must be False, got True"),
        ({"num_attention_heads": 3}, "multiple of 3 heads, got 22"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": "22"}, "hidden_size must be a whole number, got '22'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, got True"),
        ({"vocab_size": 37.0}, "vocab_size must be a whole number, got 37.0"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"pad_token_id": 37}, "pad_token_id must be below 37 words, got 37"),
        ({"pad_token_id": -1}, "pad_token_id must be at least 0, got -1"),
        ({"layer_norm_eps": 2}, r"layer_norm_eps must be in \[0, 1\), got 2"),
        ({"layer_norm_eps": "1e-12"}, "layer_norm_eps must be a number, got '1e-12'"),
        ({"hidden_dropout_prob": 1}, r"hidden_dropout_prob must be in \[0, 1\), got 1"),
        ({"hidden_dropout_prob": float("nan")}, r"hidden_dropout_prob must be in \[0, 1\), got nan"),
    ],
)
def test_an_impossible_value_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        EncoderConfig.from_dict(SIZES | change)


@pytest.mark.parametrize("name", SIZES)
def test_a_missing_size_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelDirectoryError, match=f"lacks {name}"):
        EncoderConfig.from_dict({key: size for key, size in SIZES.items() if key != name})
