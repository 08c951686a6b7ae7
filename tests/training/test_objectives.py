import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from encoder.config import EncoderConfig
from encoder.heads import LanguageModelHead
from encoder.model import Decoder, Encoder
from encoder.model_dir import ModelSpec
from training.batches import Sampler
from training.config import Classes, Denoise, Distill, FinetuneRun, Loop, Masked, Objective, Pairs, Scored
from training.data import Corpus
from training.objectives import (
    LabelHead,
    contrastive_loss,
    denoising_loss,
    distillation_loss,
    documents_mask,
    encode,
    mask_tokens,
    masked_token_loss,
    ranking_loss,
)
from training.source import Item
from training.store import TokenStore, write_store
from training.tasks import ClassesTask, DenoiseTask, DistillTask, Embedder, MaskedTask, PairsTask, ScoredTask, Task

SPECIAL = [0, 1, 2, 3, 4]
MASK = 4
WORDS = 1009
BATCH = 7

# -------------------------------------------------------------------------------------------------------- masked tokens


def many_tokens(seed: int = 0) -> np.ndarray:
    """So many that shares of them are known within a hundredth: rows of [CLS] words [SEP] [UNK] [PAD]."""
    words = np.random.default_rng(seed).integers(5, WORDS, (1000, 101))
    words[:, 0], words[:, -3], words[:, -2], words[:, -1] = 2, 3, 1, 0
    return words


def hide(ids: np.ndarray, *, rate: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return mask_tokens(
        ids, rate=rate, special_ids=SPECIAL, mask_id=MASK, vocab_size=WORDS, generator=np.random.default_rng(seed)
    )


@pytest.mark.parametrize("rate", [0.15, 0.25, 0.3])
def test_as_many_words_are_hidden_as_asked_for_and_special_tokens_never(rate: float) -> None:
    ids = many_tokens()
    before = ids.copy()
    hidden, positions = hide(ids, rate=rate)
    assert (ids == before).all()
    assert len(positions) == round(rate * 97 * 1000)
    assert (np.diff(positions) > 0).all()  # ascending, none twice
    flat = ids.ravel()
    assert not np.isin(flat[positions], SPECIAL).any()
    untouched = np.setdiff1d(np.arange(flat.size), positions)
    assert (hidden.ravel()[untouched] == flat[untouched]).all()


def test_of_the_hidden_words_80_percent_are_masked_10_replaced_and_10_left() -> None:
    ids = many_tokens()
    hidden, positions = hide(ids, rate=0.25)
    was, now = ids.ravel()[positions], hidden.ravel()[positions]
    count = len(positions)
    masked, left = now == MASK, now == was
    replaced = ~masked & ~left
    for share, expected in ((masked.mean(), 0.8), (replaced.mean(), 0.1), (left.mean(), 0.1)):
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / count)
    drawn = now[replaced]
    assert not np.isin(drawn, SPECIAL).any()
    # any word may take the place: as many different ones as that many draws give, up to five deviations
    assert abs(drawn.mean() - (5 + WORDS - 1) / 2) < 5 * WORDS / math.sqrt(12 * len(drawn))
    assert drawn.min() < 5 + 10
    assert drawn.max() > WORDS - 10


def test_the_seed_decides_what_is_hidden() -> None:
    ids = many_tokens()
    once, twice, other = (hide(ids, rate=0.25, seed=seed) for seed in (3, 3, 5))
    assert (once[0] == twice[0]).all()
    assert (once[1] == twice[1]).all()
    assert len(np.intersect1d(once[1], other[1])) < 0.3 * len(once[1])  # a quarter by chance


def test_one_word_is_hidden_even_of_very_few() -> None:
    _, positions = hide(np.array([[2, 50, 3, 0, 0]]), rate=0.15)
    assert positions.tolist() == [1]


@pytest.fixture
def config(tiny_spec: ModelSpec) -> EncoderConfig:
    torch.manual_seed(0)
    return tiny_spec.config


def test_masked_tokens_are_scored_at_their_positions_only(config: EncoderConfig) -> None:
    head, words = LanguageModelHead(config), torch.randn(config.vocab_size, config.hidden_size)
    hidden_states = torch.randn(3, 5, config.hidden_size, requires_grad=True)
    positions, targets = torch.tensor([1, 6, 13]), torch.tensor([11, 23, 7])
    loss, accuracy = masked_token_loss(head, words, hidden_states, positions, targets)

    logits = head(hidden_states, words).reshape(15, -1)
    chances = logits.log_softmax(dim=1)
    expected = -(chances[1, 11] + chances[6, 23] + chances[13, 7]) / 3
    torch.testing.assert_close(loss, expected)
    assert accuracy == 0
    right = logits.argmax(dim=1)[positions]
    right[2] = (right[2] + 1) % config.vocab_size
    _, accuracy = masked_token_loss(head, words, hidden_states, positions, right)
    assert float(accuracy) == pytest.approx(2 / 3)

    loss.backward()
    assert hidden_states.grad is not None
    reached = hidden_states.grad.reshape(15, -1).abs().sum(dim=1).nonzero().flatten()
    assert reached.tolist() == positions.tolist()


def test_documents_packed_in_a_window_do_not_see_one_another(config: EncoderConfig) -> None:
    starts = torch.tensor([[False, False, True, False, True, False, False]])
    seen = documents_mask(starts)[0, 0]
    document = [0, 0, 1, 1, 2, 2, 2]
    assert seen.tolist() == [[mine == theirs for theirs in document] for mine in document]

    encoder = Encoder(config).eval()
    ids = torch.tensor([[7, 8, 2, 9, 2, 10, 11]])
    changed = ids.clone()
    changed[0, 3] = 20
    once, other = (encode(encoder, each, documents_mask(starts)) for each in (ids, changed))
    same = (once == other).all(dim=2)[0]
    assert same.tolist() == [True, True, False, False, True, True, True]


# ---------------------------------------------------------------------------------------------------- losses on vectors


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


NONE_SAME = torch.eye(BATCH, dtype=torch.bool)


def test_infonce_finds_the_partner_both_ways() -> None:
    first, second = vectors(BATCH, 11), vectors(BATCH, 11, seed=1)
    loss = contrastive_loss(first, second, NONE_SAME, NONE_SAME, temperature=0.3)
    one, two = first.double().numpy(), second.double().numpy()
    expected = 0.0
    for i in range(BATCH):
        cosines = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in two] for a in one]
        row = [math.exp(cosines[i][j] / 0.3) for j in range(BATCH)]
        column = [math.exp(cosines[j][i] / 0.3) for j in range(BATCH)]
        expected -= math.log(row[i] / sum(row)) / 2 + math.log(column[i] / sum(column)) / 2
    assert float(loss) == pytest.approx(expected / BATCH, rel=1e-5)


def test_infonce_by_hand() -> None:
    """Two pairs, each of the same vectors, at right angles to the other: −log(e² / (e² + 1))."""
    axes = 3 * torch.eye(2)
    loss = contrastive_loss(axes, axes, torch.eye(2) > 0, torch.eye(2) > 0, temperature=0.5)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-5)


def test_a_text_in_two_pairs_is_no_negative_of_itself() -> None:
    """Rows 0 and 1 share their first text: neither's second text is a negative of the other's first."""
    first, second = vectors(BATCH, 11), vectors(BATCH, 11, seed=1)
    first[1] = first[0]
    same = NONE_SAME.clone()
    same[0, 1] = same[1, 0] = True
    loss = contrastive_loss(first, second, same, NONE_SAME, temperature=0.3)
    cosines = functional.cosine_similarity(first[:, None], second[None], dim=2).double().numpy() / 0.3
    terms = []
    for scores in (cosines, cosines.T):
        for i in range(BATCH):
            others = [j for j in range(BATCH) if {i, j} != {0, 1}]
            terms.append(-math.log(math.exp(scores[i, i]) / sum(math.exp(scores[i, j]) for j in others)))
    assert float(loss) == pytest.approx(np.mean(terms), rel=1e-5)
    assert loss < contrastive_loss(first, second, NONE_SAME, NONE_SAME, temperature=0.3)


def distill(student: Tensor, target: Tensor, teacher: Tensor, **weights: float) -> float:
    chosen = {"cosine": 0.0, "contrast": 0.0, "similarity": 0.0, "temperature": 0.2} | weights
    return float(distillation_loss(student, target, teacher, **chosen))


def test_a_student_learns_the_teachers_vectors_and_the_cosines_between_them() -> None:
    student, target = vectors(BATCH, 5), vectors(BATCH, 5, seed=1)
    teacher = functional.normalize(vectors(BATCH, 13, seed=2), dim=1)
    mine, theirs = (each / each.norm(dim=1, keepdim=True) for each in (student, target))
    cosine = 1 - (mine * theirs).sum(dim=1).mean()
    squares = [
        (float(mine[i] @ mine[j]) - float(teacher[i] @ teacher[j])) ** 2 for i in range(BATCH) for j in range(BATCH)
    ]
    found = (mine @ theirs.T / 0.2).log_softmax(dim=1).diagonal()
    assert distill(student, target, teacher, cosine=1.0) == pytest.approx(float(cosine), rel=1e-5)
    assert distill(student, target, teacher, similarity=1.0) == pytest.approx(float(np.mean(squares)), rel=1e-5)
    assert distill(student, target, teacher, contrast=1.0) == pytest.approx(-float(found.mean()), rel=1e-5)
    together = 2 * float(cosine) - 3 * float(found.mean()) + 5 * float(np.mean(squares))
    assert distill(student, target, teacher, cosine=2.0, contrast=3.0, similarity=5.0) == pytest.approx(
        together, rel=1e-5
    )


def test_a_student_like_its_teacher_has_nothing_left_to_learn() -> None:
    teacher = functional.normalize(vectors(BATCH, 5), dim=1)
    lengths = torch.arange(1.0, BATCH + 1)[:, None]  # a cosine knows no length
    assert distill(teacher * lengths, teacher, teacher, cosine=1.0, similarity=1.0) == pytest.approx(0, abs=1e-6)
    assert distill(-teacher, teacher, teacher, cosine=1.0) == pytest.approx(2, rel=1e-5)
    # turned all alike, the student has none of the vectors but all the cosines
    turned, _ = torch.linalg.qr(vectors(5, 5, seed=3))
    assert distill(teacher @ turned, teacher, teacher, similarity=1.0) == pytest.approx(0, abs=1e-6)
    assert distill(teacher @ turned, teacher, teacher, cosine=1.0) > 0.1


def test_ranking_by_hand() -> None:
    """Cosines 1, 0 and −1; the scores want the last before the first, and the second after both."""
    first = torch.tensor([[2.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    second = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-5.0, 0.0]])
    loss = ranking_loss(first, second, torch.tensor([4.0, 1.0, 5.0]), temperature=0.5)
    # of each pair with the higher score, (cosine of the lower − its own) / 0.5
    expected = math.log(1 + math.exp((0 - 1) / 0.5) + math.exp((1 + 1) / 0.5) + math.exp((0 + 1) / 0.5))
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_pairs_of_one_score_have_no_order() -> None:
    first, second = vectors(BATCH, 5).requires_grad_(), vectors(BATCH, 5, seed=1)
    loss = ranking_loss(first, second, torch.full((BATCH,), 2.0), temperature=0.05)
    loss.backward()
    assert loss == 0
    assert first.grad is not None
    assert (first.grad == 0).all()


def test_a_label_is_read_from_the_direction_of_the_embedding() -> None:
    torch.manual_seed(0)
    head, embeddings, labels = LabelHead(5, 3), vectors(BATCH, 5), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    loss, accuracy = head(embeddings, labels)
    unit = (embeddings / embeddings.norm(dim=1, keepdim=True)).detach().numpy()
    logits = 10 * unit @ head.linear.weight.detach().numpy().T + head.linear.bias.detach().numpy()
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert float(loss.detach()) == pytest.approx(-np.log(chances[range(BATCH), labels]).mean(), rel=1e-5)
    assert float(accuracy) == pytest.approx((logits.argmax(axis=1) == labels.numpy()).mean())
    torch.testing.assert_close(head(7 * embeddings, labels)[0], loss)


# ---------------------------------------------------------------------------------------------------- denoising (TSDAE)


def test_denoising_reads_the_embedding_through_cross_attention(config: EncoderConfig) -> None:
    decoder, head = Decoder(config, cross_attention=True).eval(), LanguageModelHead(config)
    ids = torch.tensor([[2, 7, 8, 9, 3], [2, 10, 11, 3, 0]])
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6])  # of 2 × 4: the last of the second row is padding
    embeddings = vectors(2, config.hidden_size).requires_grad_()
    loss = denoising_loss(decoder, head, embeddings, ids, positions)

    # each next token from what stands before it, one by one
    terms = []
    for row, length in ((0, 5), (1, 4)):
        for place in range(1, length):
            states = decoder(ids[row : row + 1, :place], embeddings[row][None, None])
            chances = head(states[0, -1], decoder.embeddings.word.weight).log_softmax(dim=0)
            terms.append(-chances[ids[row, place]])
    torch.testing.assert_close(loss, torch.stack(terms).mean())

    loss.backward()
    assert embeddings.grad is not None
    assert (embeddings.grad.abs().sum(dim=1) > 0).all()
    other = denoising_loss(decoder, head, vectors(2, config.hidden_size, seed=1), ids, positions)
    assert abs(other - loss).item() > 1e-4
    with torch.no_grad():
        for layer in decoder.layers:
            layer.get_submodule("cross_attention.value").get_parameter("weight").zero_()  # nothing comes through
    shut = [denoising_loss(decoder, head, vectors(2, config.hidden_size, seed=seed), ids, positions) for seed in (1, 2)]
    assert torch.equal(*shut)


# ---------------------------------------------------------------------------------------- the objectives on their texts

TEXTS = [
    "the pizza came out of the oven",
    "it tasted good",
    "the bank of the river",
    "the bank lent money",
    "a squatch eats pizza",
    "the oven of the bank and the river",
    "money tasted good",
]


def make_store(path: Path, spec: ModelSpec, *, sides: int = 1, values: list[str] | None = None) -> TokenStore:
    path.mkdir()
    items = [Item(tuple(TEXTS[(row + 3 * side) % len(TEXTS)] for side in range(sides)), "", 0, row) for row in range(7)]
    store = write_store(path, items, spec, sides=sides)
    if values is not None:
        np.save(path / "values.npy", np.array(values))
    return store


def run_of(objective: Objective, prefixes: tuple[int, ...] = ()) -> FinetuneRun:
    return FinetuneRun(loop=Loop(steps=1), objectives=(objective,), prefixes=prefixes)  # type: ignore[arg-type]


def sampler(store: TokenStore) -> Sampler:
    return Sampler(store.lengths(), batch_size=BATCH, batch_tokens=1024, seed=0)


WEIGHTS = {"cosine": 4.0, "contrast": 1.0, "similarity": 20.0, "temperature": 0.05}
CORPUS = (Corpus.model_validate({"path": "texts.txt"}),)


def build(kind: str, path: Path, spec: ModelSpec, encoder: Encoder, prefixes: tuple[int, ...] = ()) -> Task:
    if kind == "pairs":
        pairs, store = Pairs(kind="pairs", corpora=CORPUS), make_store(path, spec, sides=2)
        return PairsTask(pairs, store, sampler(store), run_of(pairs, prefixes))
    if kind == "scored":
        scored = Scored(kind="scored", corpora=CORPUS)
        store = make_store(path, spec, sides=2, values=["0", "1", "2", "3", "2.5", "1", "0"])
        return ScoredTask(scored, store, sampler(store), run_of(scored, prefixes))
    if kind == "classes":
        classes, store = Classes(kind="classes", corpora=CORPUS), make_store(path, spec, values=list("aabbcab"))
        return ClassesTask(classes, store, sampler(store), run_of(classes, prefixes), spec=spec)
    if kind == "denoise":
        denoise, store = Denoise(kind="denoise", corpora=CORPUS), make_store(path, spec)
        return DenoiseTask(denoise, store, sampler(store), run_of(denoise, prefixes), spec=spec, encoder=encoder)
    if kind == "masked":
        masked, store = Masked(kind="masked", corpora=CORPUS, masking_rate=0.25), make_store(path, spec)
        return MaskedTask(masked, store, sampler(store), run_of(masked), spec=spec, head=LanguageModelHead(spec.config))
    distilled, store = Distill.model_validate({"kind": "distill", "corpora": CORPUS, **WEIGHTS}), make_store(path, spec)
    teacher = functional.normalize(vectors(7, 19), dim=1)
    np.save(path / "vectors.npy", teacher.numpy().astype(np.float16))
    return DistillTask(distilled, store, sampler(store), run_of(distilled, prefixes), spec=spec)


KINDS = ("pairs", "scored", "classes", "denoise", "masked", "distill")


@pytest.mark.parametrize("kind", KINDS)
def test_each_objective_teaches_the_encoder_with_finite_gradients(
    kind: str, tmp_path: Path, tiny_spec: ModelSpec
) -> None:
    torch.manual_seed(0)
    encoder = Encoder(tiny_spec.config)
    embed = Embedder(encoder, tiny_spec)
    task = build(kind, tmp_path / "store", tiny_spec, encoder)
    figures = task.loss(embed, task.draw(np.random.default_rng(0), 0))
    figures["loss"].backward()
    for part in (encoder, task):
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    for layer in encoder.layers:
        gradient = layer.get_parameter("attention.query.weight").grad
        assert gradient is not None
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("denoise", "masked")])
def test_matryoshka_takes_the_mean_over_the_prefixes(kind: str, tmp_path: Path, tiny_spec: ModelSpec) -> None:
    """Over 3, 5 and all 14 components; of a prefix as long as the whole there is no second count."""
    torch.manual_seed(0)
    encoder = Encoder(tiny_spec.config).eval()
    embed = Embedder(encoder, tiny_spec)
    task = build(kind, tmp_path / "store", tiny_spec, encoder, prefixes=(3, 5, 14))
    inputs = task.draw(np.random.default_rng(0), 0)
    loss = task.loss(embed, inputs)["loss"]
    embeddings = [embed(**inputs[side]) for side in ("side0", "side1") if side in inputs]
    losses = []
    for place, size in enumerate((3, 5, 14)):
        cut = [each[:, :size] for each in embeddings]
        if isinstance(task, PairsTask):
            losses.append(contrastive_loss(cut[0], cut[1], NONE_SAME, NONE_SAME, temperature=0.05))
        elif isinstance(task, ScoredTask):
            losses.append(ranking_loss(cut[0], cut[1], inputs["scores"], temperature=0.05))
        elif isinstance(task, ClassesTask):
            losses.append(task.heads[place](cut[0], inputs["labels"])[0])
        else:
            target = inputs["teacher"] @ task.get_buffer("projection")
            losses.append(distillation_loss(cut[0], target[:, :size], inputs["teacher"], **WEIGHTS))
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    assert len({round(float(each.detach()), 4) for each in losses}) == 3


def test_the_teachers_components_keep_its_cosines_as_well_as_so_many_can(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    """The projection is that of the singular value decomposition, not centred, the largest component first."""
    task = build("distill", tmp_path / "store", tiny_spec, Encoder(tiny_spec.config))
    teacher = np.load(tmp_path / "store" / "vectors.npy").astype(np.float64)
    projection = task.get_buffer("projection").numpy().astype(np.float64)
    assert projection.shape == (19, 14)
    np.testing.assert_allclose((teacher @ projection) @ (teacher @ projection).T, teacher @ teacher.T, atol=1e-5)
    sizes = np.linalg.norm(teacher @ projection, axis=0)
    np.testing.assert_allclose(sizes[:7], np.linalg.svd(teacher, compute_uv=False), rtol=1e-4)


def test_each_text_goes_with_its_own_value_and_vector(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    """In whatever order a batch draws them."""
    encoder = Encoder(tiny_spec.config)
    for kind, key, column in (
        ("distill", "teacher", "vectors"),
        ("scored", "scores", "values"),
        ("classes", "labels", "values"),
    ):
        task = build(kind, tmp_path / kind, tiny_spec, encoder)
        items = np.array([5, 2, 2, 6, 0])
        inputs = task.inputs(items, np.random.default_rng(0), 0)
        stored = np.load(tmp_path / kind / f"{column}.npy")[items]
        expected = np.array(["abc".index(value) for value in stored]) if kind == "classes" else stored.astype("f4")
        assert inputs[key].tolist() == expected.tolist()
        texts = [task.store.text(int(item)).tolist() for item in items]
        rows, mask = inputs["side0"]["input_ids"], inputs["side0"]["attention_mask"]
        assert [row[real].tolist() for row, real in zip(rows, mask, strict=True)] == texts


def test_denoising_keeps_some_words_in_order_and_the_special_tokens(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    task = build("denoise", tmp_path / "store", tiny_spec, Encoder(tiny_spec.config))
    generator = np.random.default_rng(0)
    words = kept = 0
    for _ in range(200):
        inputs = task.inputs(np.arange(7), generator, 0)
        for item in range(7):
            whole = task.store.text(item).tolist()
            left = inputs["left"]["input_ids"][item][inputs["left"]["attention_mask"][item]].tolist()
            assert (left[0], left[-1]) == (2, 3)
            assert len(left) > 2
            rest = iter(whole)
            assert all(token in rest for token in left)  # a subsequence
            words += len(whole) - 2
            kept += len(left) - 2
    # 60 % are deleted; of the shortest texts one word is put back if none is left
    assert 0.4 <= kept / words < 0.44
    scored = inputs["whole"]["positions"].tolist()
    lengths = [len(task.store.text(item)) for item in range(7)]
    width = max(lengths) - 1
    assert scored == [row * width + place for row in range(7) for place in range(lengths[row] - 1)]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_does_not_change_an_embedding_in_training(pooling: str, tiny_spec: ModelSpec) -> None:
    spec = ModelSpec(**{**vars(tiny_spec), "pooling": pooling})
    torch.manual_seed(0)
    embed = Embedder(Encoder(spec.config), spec).eval()  # no dropout; attention is written out as in training
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    alone = embed(ids, torch.ones_like(ids, dtype=torch.bool), padded=False)
    mask = torch.tensor([[True] * 5 + [False] * 2])
    beside = embed(torch.cat([ids, torch.zeros(1, 2, dtype=torch.int64)], dim=1), mask, padded=True)
    torch.testing.assert_close(alone, beside, atol=1e-6, rtol=1e-5)


def test_vectors_all_alike_have_finite_losses_and_gradients() -> None:
    """A collapsed encoder must be able to leave that state, not end in NaN."""
    losses: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda v: contrastive_loss(v, v, NONE_SAME, NONE_SAME, temperature=0.05),
        lambda v: ranking_loss(v, v, torch.arange(7.0), temperature=0.05),
        lambda v: distillation_loss(v, v, v, cosine=4.0, contrast=1.0, similarity=20.0, temperature=0.05),
    )
    for each in losses:
        for fill in (1.0, 0.0):
            collapsed = torch.full((BATCH, 5), fill, requires_grad=True)
            loss = each(collapsed)
            loss.backward()
            assert loss.isfinite()
            assert collapsed.grad is not None
            assert collapsed.grad.isfinite().all()
