"""What we save, others load: the same vectors in sentence-transformers and transformers, current and older."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch

from encoder import ModelSpec, SentenceEncoder
from encoder.checkpoint import load_encoder, load_masked_language_model, save
from encoder.heads import LanguageModelHead
from encoder.model import Encoder
from encoder.model_dir import read_spec

GOLDEN = Path(__file__).parent / "golden"
# The last releases before transformers 5 and sentence-transformers 4, with what they insist on.
OLDER = ["sentence-transformers==3.4.1", "transformers==4.49.0", "tokenizers==0.21.4", "huggingface-hub==0.29.3"]
OLDER += ["requests", "urllib3", "idna", "certifi", "charset-normalizer", "pillow"]

# Loads the directories named on the command line, by sentence-transformers and by transformers alone, and writes what
# comes out. It is run by releases that know nothing of ours.
REFERENCE = """
    import json, sys, warnings
    import numpy as np
    warnings.simplefilter("ignore")
    import sentence_transformers, torch, transformers
    transformers.logging.set_verbosity_error()
    texts = json.loads(open(sys.argv[1]).read())
    outputs = {"versions": np.array([sentence_transformers.__version__, transformers.__version__])}
    for path in sys.argv[3:]:
        model = sentence_transformers.SentenceTransformer(path, device="cpu")
        outputs[path + ":vectors"] = model.encode(texts)
        outputs[path + ":max_seq_length"] = np.array(model.max_seq_length)
        outputs[path + ":dtype"] = np.array(str(next(model.parameters()).dtype))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        batch = tokenizer(texts[:3], padding=True, truncation=True, return_tensors="pt")
        bert = transformers.BertModel.from_pretrained(path).eval()
        with torch.no_grad():
            outputs[path + ":hidden_states"] = bert(**batch).last_hidden_state.numpy()
            if transformers.AutoConfig.from_pretrained(path).architectures == ["BertForMaskedLM"]:
                head = transformers.BertForMaskedLM.from_pretrained(path).eval()
                outputs[path + ":logits"] = head(**batch).logits.numpy()
        outputs[path + ":input_ids"] = batch["input_ids"].numpy()
        outputs[path + ":attention_mask"] = batch["attention_mask"].numpy()
    np.savez(sys.argv[2], **outputs)
"""


@pytest.fixture(scope="module")
def saved(minilm_dir: Path, tiny_spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The real model, saved again, also as float16; and a tiny one with a head that pools by [CLS]."""
    folder = tmp_path_factory.mktemp("saved")
    spec, encoder = read_spec(minilm_dir), load_encoder(minilm_dir)
    save(folder / "minilm", spec, encoder)
    save(folder / "minilm16", spec, encoder, precision="float16")
    torch.manual_seed(5)
    tiny = ModelSpec(**{**vars(tiny_spec), "pooling": "cls", "normalize": False})
    head = LanguageModelHead(tiny.config)
    torch.nn.init.normal_(head.bias)
    save(folder / "tiny", tiny, Encoder(tiny.config), head)
    return {name: folder / name for name in ("minilm", "minilm16", "tiny")}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Older releases in a folder of their own; torch, NumPy and the rest come from this environment."""
    folder = tmp_path_factory.mktemp("older")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *OLDER]
    subprocess.run(command, check=True, timeout=300)
    return folder


def texts() -> list[str]:
    lines = (GOLDEN / "texts.txt").read_text(encoding="utf-8").splitlines()
    return [
        *lines[::5],
        "the pizza came out of the oven and it tasted good " * 3,
        "squatch eats PIZZA",
        "",
        "Ünknöwn é",
    ]


@pytest.mark.parametrize("release", ["current", "older"])
def test_others_give_the_same_vectors(
    saved: dict[str, Path], release: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    environment = {"PYTHONPATH": str(request.getfixturevalue("older"))} if release == "older" else {}
    (tmp_path / "texts.json").write_text(json.dumps(texts()))
    command = [sys.executable, "-c", dedent(REFERENCE), tmp_path / "texts.json", tmp_path / "outputs.npz"]
    subprocess.run([*map(str, command), *map(str, saved.values())], check=True, timeout=300, env=environment)
    outputs = np.load(tmp_path / "outputs.npz")
    assert [version.split(".")[0] for version in outputs["versions"]] == (["3", "4"] if environment else ["6", "5"])

    for path in saved.values():
        ours = SentenceEncoder.load(path)
        vectors = ours.encode(texts(), normalize=ours.spec.normalize)
        assert outputs[f"{path}:max_seq_length"] == ours.spec.max_length
        assert outputs[f"{path}:dtype"] == "torch.float32"
        assert np.abs(outputs[f"{path}:vectors"] - vectors).max() <= 1e-5

        input_ids, attention_mask = (outputs[f"{path}:{name}"] for name in ("input_ids", "attention_mask"))
        real = torch.tensor(attention_mask, dtype=torch.bool)
        hidden_states = load_encoder(path)(torch.tensor(input_ids), real)
        assert np.abs(outputs[f"{path}:hidden_states"] - hidden_states.detach().numpy())[real.numpy()].max() <= 1e-5

    encoder, head = load_masked_language_model(saved["tiny"])
    logits = head(encoder(torch.tensor(input_ids), real), encoder.embeddings.word.weight).detach().numpy()
    assert np.abs(outputs[f"{saved['tiny']}:logits"] - logits)[real.numpy()].max() <= 1e-5


def test_what_the_current_release_saves_is_loaded(saved: dict[str, Path], tmp_path: Path) -> None:
    """Since 5.4 the pooling file, the module paths and the place of the maximum length are new."""
    code = """
        import sys
        from sentence_transformers import SentenceTransformer
        SentenceTransformer(sys.argv[1], device="cpu").save(sys.argv[2])
    """
    for name in ("minilm", "tiny"):
        command = [sys.executable, "-c", dedent(code), str(saved[name]), str(tmp_path / name)]
        subprocess.run(command, check=True, timeout=300)
        ours, theirs = SentenceEncoder.load(saved[name]), SentenceEncoder.load(tmp_path / name)
        assert "pooling_mode_mean_tokens" not in (tmp_path / name / "1_Pooling/config.json").read_text()
        assert theirs.spec.max_length == ours.spec.max_length
        assert theirs.spec.pooling == ours.spec.pooling
        assert theirs.spec.prompts == ours.spec.prompts or not ours.spec.prompts
        assert np.abs(theirs.encode(texts()) - ours.encode(texts())).max() <= 1e-5
