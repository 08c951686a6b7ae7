"""What people come for: embed, store, search, teach, classify, on a real server; and again after a restart."""

import signal
from collections.abc import Callable

import numpy as np
import pytest

from encoder import SentenceEncoder

DOCUMENTS = [
    ("refund", "How to get your money back: refunds are paid within ten days after we receive the parcel."),
    ("delivery", "Parcels are delivered from Monday to Saturday between eight and six o'clock."),
    ("password", "If you cannot log in, reset your password with the link on the sign-in page."),
    ("warranty", "The warranty covers two years from the day of purchase and any fault of the material."),
    ("battery", "Charge the battery fully before the first use; it lasts about twelve hours."),
    ("screen", "Clean the display with a dry, soft cloth and never with alcohol."),
    ("invoice", "Your bill is sent by e-mail; you find earlier bills in your account."),
    ("oven", "Preheat the oven to two hundred degrees and bake the pizza for twelve minutes."),
    ("river", "The trail follows the bank of the river for three miles and ends at the old mill."),
    ("bank", "The bank lends money to small firms at a fixed rate of interest."),
]
QUESTIONS = {
    "refund": "I want my money back",
    "delivery": "when will the package arrive",
    "password": "I forgot my login",
    "warranty": "it broke after a year, who pays for the repair?",
    "battery": "how long can I use it without plugging it in",
    "screen": "there are fingerprints on the monitor",
    "oven": "how hot should it be for baking",
    "river": "a walk along the water",
    "bank": "getting a loan for my company",
}
REVIEWS = {
    "positive": [
        "I love it, works perfectly.",
        "Great quality and quick delivery.",
        "Best purchase I made this year.",
        "The food was delicious and the staff very friendly.",
        "A wonderful film, I laughed and cried.",
        "Sturdy, pretty, and worth every penny.",
        "My kids adore this toy.",
        "Excellent sound for such a small speaker.",
        "We had a fantastic evening.",
        "Highly recommended, exceeded my expectations.",
    ],
    "negative": [
        "It broke after two days.",
        "Terrible quality, I want my money back.",
        "Worst purchase I made this year.",
        "The food was cold and the staff rude.",
        "A boring film, I fell asleep.",
        "Flimsy, ugly, and far too expensive.",
        "My kids lost interest after a minute.",
        "Awful sound, it rattles and hums.",
        "We had a miserable evening.",
        "Do not buy this, it never worked.",
    ],
}
NEW_REVIEWS = {
    "What a lovely little restaurant, we will be back!": "positive",
    "Waste of money, stopped working within a week.": "negative",
    "Superb battery, and it charges fast.": "positive",
    "Disappointing, the picture is blurry.": "negative",
}


def test_the_whole_way_and_the_same_after_a_restart(start_server: Callable, shipped: SentenceEncoder) -> None:
    server = start_server()
    client = server.client

    answer = client.post("/embed", json={"inputs": ["Pizza is great.", "Pizza is awesome."]})
    assert answer.status_code == 200
    vectors = np.array(answer.json(), dtype=np.float32)
    assert np.abs(vectors - shipped.encode(["Pizza is great.", "Pizza is awesome."])).max() <= 1e-5
    assert "x-truncated-inputs" not in answer.headers

    stored = [{"id": name, "text": text, "metadata": {"length": len(text)}} for name, text in DOCUMENTS]
    answer = client.post("/collections/help/documents", json=stored)
    assert (answer.status_code, answer.json()) == (201, {"ids": [name for name, _ in DOCUMENTS]})

    examples = [{"text": text, "label": label} for label, texts in REVIEWS.items() for text in texts]
    answer = client.put("/classifiers/sentiment", json={"examples": examples})
    assert answer.status_code == 200, answer.text
    assert answer.json()["labels"] == ["negative", "positive"]

    def ask() -> tuple[dict, list]:
        found = {
            name: client.post("/search", json={"query": question, "collection": "help", "k": 3}).json()["results"]
            for name, question in QUESTIONS.items()
        }
        return found, client.post("/classify", json={"inputs": list(NEW_REVIEWS)}).json()

    found, classified = ask()
    for name, results in found.items():
        assert name in [result["id"] for result in results]
        assert results[0]["metadata"] == {"length": len(results[0]["text"])}
        scores = [result["score"] for result in results]
        assert scores == sorted(scores, reverse=True)
    # A small model: two answers may stand second or third.
    assert sum(results[0]["id"] == name for name, results in found.items()) >= len(QUESTIONS) - 2
    assert [each["label"] for each in classified] == list(NEW_REVIEWS.values())
    for each in classified:
        assert each["score"] == each["scores"][each["label"]] == max(each["scores"].values())
        assert sum(each["scores"].values()) == pytest.approx(1, abs=1e-6)

    assert server.stop() in (0, -signal.SIGTERM)  # uvicorn ends what it can and passes the signal on
    server.start()
    assert ask() == (found, classified)
    info = client.get("/info").json()
    assert info["fingerprint"] == shipped.fingerprint
    assert client.get("/collections/help").json()["count"] == len(DOCUMENTS)
