"""slime's rollout function: the judged turns of a running server as slime's samples.

    python train.py --rollout-function-path openclaw_rl.integrations.slime.generate_rollout …

The server is at OPENCLAW_RL_URL, its admin key in OPENCLAW_RL_KEY. OPENCLAW_RL_LEASE_SECONDS has to be longer than
slime takes from one rollout to the next. docs/slime.md has the other arguments. slime itself is imported when the
function is called.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.client import Client, Retries, ServerError, server_root

log = logging.getLogger(__name__)

URL, KEY, LEASE = "OPENCLAW_RL_URL", "OPENCLAW_RL_KEY", "OPENCLAW_RL_LEASE_SECONDS"
DEFAULT_URL = "http://127.0.0.1:30000"
#: Advantages that differ by less are equal.
MAX_ROUNDING = 1e-9
#: How long one claim waits at the server; the client then asks again.
WAIT_SECONDS = 30.0
#: How long an answer may take beyond that: a claim can be hundreds of megabytes.
ANSWER_SECONDS = 300.0
LEASE_ENDED = "lease_ended"
#: A server that is away is asked until it answers.
TRAINER_RETRIES = Retries(
    math.inf, statuses=range(500, 600), unsent=True, broken=True, first_pause=1.0, max_pause=30.0, spread=0.0
)


class TrainerClient:
    """Claims judged turns from a running server, and confirms them. Raises ServerError for what a server refuses.

    A server that cannot be reached is asked again until it answers: claims that got lost run out by themselves, and a
    lease can be confirmed as often as one likes.
    """

    def __init__(self, url: str, key: str = "", *, retries: Retries = TRAINER_RETRIES) -> None:
        """`url` is the server's, with or without /v1; `key` is its admin key, if it has one."""
        self._client = Client(server_root(url), key, retries=retries, on_retry=self._log_retry, through_proxy=True)

    def claim(self, count: int, lease_seconds: float | None = None) -> dict[str, Any]:
        """At least `count` turns, by group, as soon as there are so many."""
        body: dict[str, Any] = {"count": count, "wait_seconds": WAIT_SECONDS}
        if lease_seconds is not None:
            body["lease_seconds"] = lease_seconds
        reason = ""
        while True:
            answer: dict[str, Any] = self._post("claim", body)
            if answer["lease"] is not None:
                return answer
            if answer["waiting_for"] != reason:
                reason = answer["waiting_for"]
                log.info("No turns to train on yet: %s.", reason)

    def confirm(self, lease: str) -> int:
        """Tell the server that a lease's turns were trained on; the step."""
        return int(self._post("confirm", {"lease": lease})["step"])

    def _post(self, call: str, body: Mapping[str, Any]) -> Any:
        return self._client.ask("POST", f"/v1/training/{call}", body, WAIT_SECONDS + ANSWER_SECONDS)

    def _log_retry(self, failure: ServerError, pause: float) -> None:
        url, message = self._client.shown_url, failure.message[:200]
        log.warning("%s does not answer (%s); it is asked again in %.0f s.", url, message, pause)


class RolloutSource:
    """The server, and the lease that has not been confirmed yet.

    - A lease is confirmed when the next rollout is asked for: with slime's `train.py`, its turns are trained on then.
    - If slime dies before that, the lease runs out and the server hands the turns out again.
    """

    def __init__(self, client: TrainerClient, lease_seconds: float | None = None) -> None:
        self.client, self.lease_seconds = client, lease_seconds
        self._unconfirmed: str | None = None
        self._late = 0

    def next(self, args: Any) -> Any:
        """The samples of the next rollout, as slime's `RolloutFnTrainOutput`."""
        from slime.rollout.base_types import RolloutFnTrainOutput

        check_arguments(args)
        self._confirm()
        claim = self.client.claim(args.rollout_batch_size * args.n_samples_per_prompt, self.lease_seconds)
        samples = to_samples(claim["groups"], args)
        self._unconfirmed = claim["lease"]
        turns = sum(map(len, claim["groups"]))
        metrics = {"openclaw/step": claim["step"], "openclaw/turns": turns, "openclaw/late_leases": self._late}
        return RolloutFnTrainOutput(samples=samples, metrics=metrics)

    def _confirm(self) -> None:
        if self._unconfirmed is None:
            return
        try:
            step = self.client.confirm(self._unconfirmed)
            log.info("Step %d is confirmed.", step)
        except ServerError as error:
            if error.code != LEASE_ENDED:
                raise
            self._late += 1
            log.error("slime trained on turns that will be handed out again: %s Set %s.", error, LEASE)
        self._unconfirmed = None


#: Of this process; slime calls the function in one actor.
_source: RolloutSource | None = None


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Claim turns from the server, and confirm those of the rollout before. For slime's --rollout-function-path."""
    global _source
    if evaluation:
        raise ValueError("Rollouts of users cannot be repeated for an evaluation: leave out --eval-interval.")
    if _source is None:
        lease = os.environ.get(LEASE)
        client = TrainerClient(os.environ.get(URL, DEFAULT_URL), os.environ.get(KEY, ""))
        _source = RolloutSource(client, float(lease) if lease else None)
    return _source.next(args)


def check_arguments(args: Any) -> None:
    """Refuse arguments with which slime would train on other numbers than those it is given. Raises ValueError."""
    wrong = {
        "--disable-rewards-normalization: rewards are advantages already": args.rewards_normalization,
        "--advantage-estimator grpo: it gives each token its reward": args.advantage_estimator != "grpo",
        "--rollout-temperature 1: recorded log-probs are raw": args.rollout_temperature != 1,
        "--use-rollout-logprobs: hints are measured from the recorded log-probs": args.use_opd
        and not args.use_rollout_logprobs,
        "--opd-kl-coef above 0": args.use_opd and not args.opd_kl_coef > 0,
    }
    missing = [argument for argument, is_missing in wrong.items() if is_missing]
    if missing:
        raise ValueError(f"slime needs {'; '.join(missing)}.")


def to_samples(groups: Sequence[Sequence[Mapping[str, Any]]], args: Any) -> list[list[Any]]:
    """The groups of a claim as lists of slime's samples.

    slime cuts off what does not fill its last global batch, so the last group is filled up with samples that it masks.
    """
    samples = [to_group(group, args) for group in groups]
    count, whole = sum(map(len, samples)), args.global_batch_size or 1
    for _ in range(math.ceil(count / whole) * whole - count):
        samples[-1].append(empty_copy(samples[-1][-1]))
    return samples


def to_group(group: Sequence[Mapping[str, Any]], args: Any) -> list[Any]:
    """The samples of one group. Turns of one session are one run: they have the number of its first turn."""
    runs: dict[str, int] = {}
    for turn in group:
        runs.setdefault(turn["session"], turn["turn"])
    return [to_sample(turn, group[0]["turn"], runs[turn["session"]], args) for turn in group]


def to_sample(turn: Mapping[str, Any], group: int, run: int, args: Any) -> Any:
    """A turn as slime's `Sample`. `group` and `run` are the numbers of their first turns."""
    from slime.utils.types import Sample

    status = Sample.Status.TRUNCATED if turn["finish_reason"] == "length" else Sample.Status.COMPLETED
    sample = Sample(
        group_index=group,
        index=turn["turn"],
        prompt=turn["messages"],
        tokens=[*turn["prompt_ids"], *turn["response_ids"]],
        response=turn["message"].get("content") or "",
        response_length=len(turn["response_ids"]),
        reward=turn["reward"],
        loss_mask=turn["loss_mask"],
        rollout_log_probs=turn["rollout_log_probs"],
        teacher_log_probs=teacher_log_probs(turn, args),
        weight_versions=[turn["weight_version"]],
        status=status,
        metadata={
            "turn": turn["turn"],
            "session": turn["session"],
            "policy_version": turn["policy_version"],
            "raw_reward": 0.0 if turn["score"] is None else turn["score"],
        },
    )
    if any(field.name == "rollout_id" for field in dataclasses.fields(Sample)):
        # Older versions do not have it.
        sample.rollout_id = run
    return sample


def teacher_log_probs(turn: Mapping[str, Any], args: Any) -> list[float] | None:
    """Log-probs with which slime's distillation computes the advantages of this turn; None if it does not distil.

    They are the teacher's own where --opd-clip, --w-opd and --baseline change nothing.
    """
    recorded, hints = turn["rollout_log_probs"], hint_advantages(turn)
    if args.use_opd:
        return [logprob + hint / args.opd_kl_coef for logprob, hint in zip(recorded, hints, strict=True)]
    if any(abs(hint) > MAX_ROUNDING for hint in hints):
        raise ValueError(
            f"Turn {turn['turn']} learns from a hint: start slime with --use-opd --opd-type sglang --opd-kl-coef 1."
        )
    return None


def hint_advantages(turn: Mapping[str, Any]) -> list[float]:
    """What the hint adds to the reward at each token; 0 where nothing is learned."""
    pairs = zip(turn["advantages"], turn["loss_mask"], strict=True)
    return [advantage - turn["reward"] if mask else 0.0 for advantage, mask in pairs]


def empty_copy(sample: Any) -> Any:
    """The same sample, from which nothing is learned."""
    mask = [0] * sample.response_length
    return dataclasses.replace(sample, reward=0.0, loss_mask=mask, remove_sample=True)
