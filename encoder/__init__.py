"""Text in, vectors out: a BERT encoder from scratch, and the door to it. Importing this needs no torch."""

from encoder.config import EncoderConfig, ModelDirectoryError
from encoder.model_dir import ModelSpec, default_model_dir
from encoder.sentence import SentenceEncoder, TokenEmbeddings
from encoder.tokenizer import TextTokenizer, TokenizedText

__all__ = ["EncoderConfig", "ModelDirectoryError", "ModelSpec", "SentenceEncoder", "TextTokenizer", "TokenEmbeddings"]
__all__ += ["TokenizedText", "default_model_dir"]
