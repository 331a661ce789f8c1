"""The options of judging."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from openclaw_rl.config.options import Section, option
from openclaw_rl.http_client import split_url

Fraction = Annotated[float, Field(ge=0, le=1)]


class JudgeOptions(Section):
    """What judges turns, and how."""

    heading = "Judge"
    judge: Literal["auto", "feedback", "llm", "custom", "none"] = option(
        "auto",
        "What scores turns: feedback (rules that read what came next), llm (a language model), custom (your own code) "
        "or none; auto tries the rules first, then a language model if a capable one is available.",
    )
    judge_base_url: str | None = option(
        None, "OpenAI-compatible endpoint of the judge model.", shown="the base model on this server"
    )
    judge_model: str | None = option(
        None, "Name of the judge model at that endpoint.", shown="needed with --judge-base-url"
    )
    judge_api_key: str = option(
        "", "API key for that endpoint.", env="OPENCLAW_JUDGE_API_KEY", shown="no key", secret=True
    )
    judge_rubric: Path | None = option(
        None, "File with your guidelines for the judge.", flags=("--rubric",), shown="no guidelines"
    )
    custom_rm_path: str | None = option(
        None, "Your own judge: path/file.py, path/file.py:name or package.module:name.", shown="no judge of your own"
    )
    step_judge: bool = option(
        False,
        "Let the judge score the turns of episodes too, as step rewards where the environment gives none "
        "(--step-reward-coef).",
    )
    check_hints: bool = option(
        False,
        "Before a hint is learned from, look at the teacher's own answers with it, and refuse the hint if they are "
        "empty, repetitive or do not depend on the request.",
    )
    num_judge_workers: int = option(4, "Turns judged at the same time.", ge=1)
    judge_timeout: float = option(120.0, "Seconds to wait for a judge's answers.", gt=0)
    prm_m: int = option(
        3,
        "Votes that the judge model gives per question.",
        env=("PRM_M", "MAJORITY_VOTE_N"),
        flags=("--majority-vote-n",),
        ge=1,
    )
    majority_vote_threshold: Fraction = option(
        0.0,
        "Share of the valid votes that a score needs; 0: the score with the most votes wins, and a tie counts as 0.",
    )
    prm_temperature: float = option(0.6, "Sampling temperature of the judge model.", ge=0)
    prm_max_tokens: int = option(4096, "Longest answer of the judge model, in tokens.", ge=1)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if (self.judge_base_url is None) != (self.judge_model is None):
            raise ValueError(
                "--judge-base-url and --judge-model must be given together: the endpoint, and the judge's name there"
            )
        if self.judge_base_url is not None:
            try:
                split_url(self.judge_base_url)
            except ValueError as error:
                raise ValueError(f"--judge-base-url is not a server's URL: {error}") from None
        if not self.judge_api_key.isascii() or not self.judge_api_key.strip().isprintable():
            raise ValueError("--judge-api-key must be plain ASCII, because it is sent in an HTTP header")
        if self.judge == "custom" and self.custom_rm_path is None:
            raise ValueError("--judge custom needs --custom-rm-path, the file with your judge")
        if self.custom_rm_path is not None and self.judge not in ("auto", "custom"):
            raise ValueError(f"--custom-rm-path is for --judge custom, not {self.judge}")
        return self

    @property
    def kind(self) -> Literal["auto", "feedback", "llm", "custom", "none"]:
        """What judges turns. A custom judge is used when its path is given."""
        return "custom" if self.custom_rm_path is not None else self.judge

    @property
    def reads_feedback(self) -> bool:
        """Whether rules are among the judges."""
        return self.kind in ("auto", "feedback")
