"""Ask a server about the recordings for the test: ``python -m examples.vowels.ask http://127.0.0.1:8000``."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from mmkit.serve import content_part

from .recordings import ANSWER_TOKENS, QUESTION, Recording, count_right, load_recordings

THREADS = 8
"""Requests that are under way together."""


def ask_about(url: str, recordings: Sequence[Recording]) -> list[str]:
    """Return the answers of a server about recordings, each in a chat of its own."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def ask(recording: Recording) -> str:
        content = [content_part("recording", recording.frames), {"type": "text", "text": QUESTION}]
        reply = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], temperature=0.0, max_tokens=ANSWER_TOKENS
        )
        return reply.choices[0].message.content.strip()  # a word begins with a space

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(ask, recordings))


if __name__ == "__main__":
    test = load_recordings("test")
    print(f"{count_right(ask_about(sys.argv[1], test), test)} of {len(test)} right")
