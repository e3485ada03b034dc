"""A program of a user, for `mypy --strict`: see tests/engine/test_public_names.py."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import llmcl


@dataclass
class Animal:
    name: str
    legs: int


def no_comma(token_ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    logits[28] = -np.inf
    return logits


def likelihood(scored: list[llmcl.LogProb]) -> float:
    return sum(each.logprob for each in scored)


def main() -> None:
    with llmcl.load("smollm2", max_context=512) as llm:
        ids: list[int] = llm.tokenizer.encode("Why is the sky blue?")
        text: str = llm.tokenizer.decode(ids)
        print(repr(llm), text, likelihood(llm.logprobs(ids, top=2)))
        for piece in llm.stream("Name a sea.", max_tokens=4, logit_bias={5: 1.0}, stop_token_ids=[7]):
            print(piece.text, end="", flush=True)
        answer: llmcl.Generation = llm.generate("Name a sea.", max_tokens=4, logprobs=2, temperature=0.5, seed=1)
        print(answer.text, likelihood(answer.logprobs), answer.stats.tpot_ms)
        answers: list[llmcl.Generation] = llm.generate(["Name a sea.", "Name a fish."], max_tokens=4)
        print([each.text for each in answers])
        for index, part in llm.stream(["Name a sea.", "Name a fish."], max_tokens=4):
            print(index, part.text)
        scores: list[float] = llm.score("The sky is", [" blue", " green"], raw=True)
        print(max(scores))
        choice = llm.generate("Yes or no?", choices=["yes", "no"], logits_processor=no_comma)
        animal = llm.generate("Describe an animal.", schema=Animal, max_tokens=64)
        print(choice.text, animal.text)
        several: list[llmcl.Generation] = llm.generate("Name a sea.", n=2, temperature=1.0, max_tokens=4)
        for index, part in llm.stream("Name a sea.", n=2, max_tokens=4):
            print(index, part.text, len(several))
        messages = [{"role": "user", "content": "Name an island."}]
        print(llm.generate(messages, max_tokens=4).text)
        with llm.engine(max_sequences=2) as engine:
            request: llmcl.Request = engine.submit("Name a sea.", max_tokens=4)
            print(request.result().text)


if __name__ == "__main__":
    main()
