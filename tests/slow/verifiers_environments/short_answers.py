"""A verifiers environment: the shorter the answer, the higher the reward. Every fifth task cannot be scored."""

from collections.abc import Iterator

import verifiers.v1 as vf


class ShortData(vf.TaskData):
    unscored: bool = False


class ShortTask(vf.Task[ShortData]):
    @vf.reward
    async def shortness(self, trace: vf.Trace) -> float:
        if self.data.unscored:
            raise RuntimeError("the scorer is broken")
        return 1.0 / (1.0 + len(trace.last_reply or ""))


class ShortAnswers(vf.Taskset[ShortTask]):
    def load(self) -> Iterator[ShortTask]:
        for number in range(10):
            data = ShortData(name=f"sum-{number}", prompt=f"What is {number} + 1?", unscored=number % 5 == 4)
            yield ShortTask(data, self.config.task)


__all__ = ["ShortAnswers"]
