"""Write minilm.safetensors: what sentence-transformers makes of texts.txt with all-MiniLM-L6-v2.

python tests/encoder/golden/write.py
"""

from pathlib import Path

import safetensors.numpy
import sentence_transformers

from encoder import default_model_dir

here = Path(__file__).parent
texts = (here / "texts.txt").read_text(encoding="utf-8").splitlines()
model = sentence_transformers.SentenceTransformer(str(default_model_dir()), device="cpu")
metadata = {"sentence_transformers": sentence_transformers.__version__, "model": "all-MiniLM-L6-v2"}
safetensors.numpy.save_file({"vectors": model.encode(texts)}, here / "minilm.safetensors", metadata=metadata)
