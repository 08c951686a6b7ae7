"""What the encoder and the decoder can and cannot see, and that they learn."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from encoder import EncoderConfig
from encoder.heads import LanguageModelHead
from encoder.model import Decoder, Encoder

CONFIG = EncoderConfig(
    vocab_size=37,
    hidden_size=22,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=41,
    max_position_embeddings=29,
    type_vocab_size=5,
)


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(7)
    # With BERT's small weights a fresh encoder hardly mixes its tokens; these are large enough to see what it does.
    return Encoder(replace(CONFIG, initializer_range=0.3)).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, CONFIG.vocab_size, shape)


def test_order_changes_the_vectors(encoder: Encoder) -> None:
    forward, backward = encoder(torch.tensor([[5, 6, 7]])), encoder(torch.tensor([[7, 6, 5]]))
    assert (forward.flip(1) - backward).abs().max() > 0.1


def test_context_changes_the_vector_of_a_token(encoder: Encoder) -> None:
    vectors = encoder(torch.tensor([[5, 9, 7], [6, 9, 8]]))[:, 1]
    assert (vectors[0] - vectors[1]).abs().max() > 0.1


def test_the_encoder_looks_both_ways(encoder: Encoder) -> None:
    input_ids = tokens(1, 11)
    changed = input_ids.clone()
    changed[0, 5] = changed[0, 5] % (CONFIG.vocab_size - 1) + 1
    moved = (encoder(input_ids) - encoder(changed)).abs().amax(-1)[0]
    assert (moved > 1e-4).all()


def test_padding_has_exactly_no_influence(encoder: Encoder) -> None:
    input_ids = tokens(3, 13)
    attention_mask = torch.arange(13) < torch.tensor([[13], [6], [1]])
    before = encoder(input_ids, attention_mask)
    input_ids[~attention_mask] = tokens(19)
    after = encoder(input_ids, attention_mask)
    assert torch.equal(before[attention_mask], after[attention_mask])


def test_a_sentence_in_a_batch_is_the_sentence_alone(encoder: Encoder) -> None:
    input_ids = tokens(3, 13)
    attention_mask = torch.arange(13) < torch.tensor([[13], [6], [1]])
    batched = encoder(input_ids, attention_mask)
    for row, length in enumerate((13, 6, 1)):
        assert_close(batched[row, :length], encoder(input_ids[row : row + 1, :length])[0], atol=1e-5, rtol=0)


def test_token_types_default_to_the_first(encoder: Encoder) -> None:
    input_ids = tokens(2, 7)
    assert torch.equal(encoder(input_ids), encoder(input_ids, token_type_ids=torch.zeros_like(input_ids)))
    assert not torch.equal(encoder(input_ids), encoder(input_ids, token_type_ids=torch.ones_like(input_ids)))


@pytest.mark.parametrize("model", [Encoder(CONFIG), Decoder(CONFIG)])
def test_a_sequence_longer_than_the_table_is_refused(model: nn.Module) -> None:
    assert model(tokens(1, 29)).shape == (1, 29, 22)
    with pytest.raises(ValueError, match=r"29 tokens \(max_position_embeddings\), got 30"):
        model(tokens(1, 30))


def test_fresh_weights_are_berts() -> None:
    torch.manual_seed(0)
    encoder = Encoder(replace(CONFIG, hidden_size=128, intermediate_size=512))
    assert encoder.layers[0].feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert encoder.layers[2].attention.query.bias.abs().max() == 0
    assert encoder.embeddings.word.weight[CONFIG.pad_token_id].abs().max() == 0


@pytest.mark.parametrize("cross_attention", [False, True])
def test_the_decoder_only_looks_back(cross_attention: bool) -> None:
    torch.manual_seed(1)
    decoder = Decoder(replace(CONFIG, initializer_range=0.3), cross_attention=cross_attention).eval()
    context = torch.randn(1, 3, 22) if cross_attention else None
    input_ids = tokens(1, 11)
    changed = input_ids.clone()
    changed[0, 5] = changed[0, 5] % (CONFIG.vocab_size - 1) + 1
    moved = (decoder(input_ids, context) - decoder(changed, context)).abs().amax(-1)[0]
    assert (moved[:5] == 0).all()
    assert (moved[5:] > 1e-4).all()


def test_the_decoder_reads_its_context_and_no_padding_of_it() -> None:
    torch.manual_seed(1)
    decoder = Decoder(replace(CONFIG, initializer_range=0.3), cross_attention=True).eval()
    input_ids, context = tokens(2, 5), torch.randn(2, 7, 22)
    context_mask = torch.arange(7) < torch.tensor([[7], [3]])
    before = decoder(input_ids, context, context_mask)
    context[~context_mask] = torch.randn(4, 22)
    assert torch.equal(before, decoder(input_ids, context, context_mask))
    context[1, 2] += 1
    after = decoder(input_ids, context, context_mask)
    assert torch.equal(before[0], after[0])
    assert ((before[1] - after[1]).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("cross_attention", [False, True])
def test_a_context_is_given_exactly_when_it_is_read(cross_attention: bool) -> None:
    context = None if cross_attention else torch.randn(1, 3, 22)
    with pytest.raises(ValueError, match=f"cross_attention is {cross_attention}"):
        Decoder(CONFIG, cross_attention=cross_attention)(tokens(1, 5), context)


SENTENCES = [
    "The pizza came out of the oven , and it tasted good",
    "The bread came out of the oven , and it smelled warm",
    "The train came out of the tunnel , and it sounded loud",
    "The sun came out of the clouds , and it looked bright",
    "Squatch eats pizza for dinner every night",
    "Pizza eats nobody , since it is food",
    "The oven was hot , so the cook opened the door",
    "The dog ran out of the house and into the garden",
    "Life is short , so eat dessert first",
    "The bank of the river was green and quiet",
    "The bank lent the money to the cook",
    "Pizza is great , and pizza is awesome",
]


def test_a_decoder_alone_learns_to_continue_a_sentence() -> None:
    """A decoder without a context is a language model: trained to predict the next word, it writes."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    index = {word: number for number, word in enumerate(words, start=2)}  # 0 pads, 1 ends
    rows = [[index[word] for word in sentence.split()] + [1] for sentence in SENTENCES]
    batch = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    torch.manual_seed(0)
    config = replace(
        CONFIG,
        vocab_size=len(words) + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    decoder, head = Decoder(config), LanguageModelHead(config)
    optimizer = torch.optim.AdamW([*decoder.parameters(), *head.parameters()], lr=5e-3)
    for _ in range(150):
        logits = head(decoder(batch[:, :-1]), decoder.embeddings.word.weight)
        loss = functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    written = [index[word] for word in ["The", "pizza", "came", "out", "of", "the", "oven", ",", "and", "it"]]
    decoder.eval()
    while written[-1] != 1 and len(written) < 20:
        logits = head(decoder(torch.tensor([written]))[0, -1], decoder.embeddings.word.weight)
        written.append(int(logits.argmax()))
    assert [words[token - 2] for token in written[10:-1]] == ["tasted", "good"]


def test_an_encoder_and_a_decoder_learn_to_copy_through_cross_attention() -> None:
    """What the decoder writes can only come from the encoder: its own input is the copy so far."""
    torch.manual_seed(0)
    config = replace(
        CONFIG,
        vocab_size=11,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    encoder, decoder, head = Encoder(config), Decoder(config, cross_attention=True), LanguageModelHead(config)
    parameters = [*encoder.parameters(), *decoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3)
    for _ in range(600):
        source = torch.randint(2, 11, (64, 5))
        begun = functional.pad(source, (1, 0), value=1)[:, :-1]
        logits = head(decoder(begun, encoder(source)), decoder.embeddings.word.weight)
        loss = functional.cross_entropy(logits.transpose(1, 2), source)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    source = torch.randint(2, 11, (200, 5))
    copied = torch.ones(200, 1, dtype=torch.long)
    context = encoder(source)
    for _ in range(5):
        logits = head(decoder(copied, context)[:, -1], decoder.embeddings.word.weight)
        copied = torch.cat([copied, logits.argmax(-1, keepdim=True)], dim=1)
    assert (copied[:, 1:] == source).all(dim=1).float().mean() >= 0.98


def test_the_language_model_head_is_tied_to_the_word_vectors() -> None:
    torch.manual_seed(0)
    encoder, head = Encoder(CONFIG), LanguageModelHead(CONFIG)
    assert sum(parameter.numel() for parameter in head.parameters()) == 22 * 22 + 22 + 2 * 22 + 37
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=1.0)
    before = encoder.embeddings.word.weight.detach().clone()
    head(torch.randn(3, 22), encoder.embeddings.word.weight).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, encoder.embeddings.word.weight)
