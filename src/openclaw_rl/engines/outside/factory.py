"""The learner that is a trainer outside this program: what it needs of the options."""

from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineUnavailable, Learner, LearnerCapabilities, Sampler
from openclaw_rl.engines.factory import EngineSettings, LearnerFactory, ModelFiles, Resources, sampler_factory

#: What a server with an outside trainer does not have.
LOST = "no undo or rollback, no gate, no candidates, no top-k distillation, no checkpoints here"


class OutsideLearnerFactory(LearnerFactory):
    """Implements `LearnerFactory` for any trainer that claims and confirms turns over HTTP.

    * Its sampler is a server that runs already, because the trainer has to push its weights there.
    * It trains on sampled tokens only: a claim has one advantage for each of them.
    """

    name = "outside"
    model_files = ModelFiles.TOKENIZER
    samplers: tuple[str, ...] = ("sglang", "vllm")
    """The samplers whose servers it can push weights into."""

    def check(self, settings: EngineSettings) -> None:
        sampler = settings.engine.sampler
        if sampler not in self.samplers or not sampler_factory(sampler).urls(settings):
            wanted = " or ".join(f"--sampler {name} --{name}-url URL" for name in self.samplers)
            raise ConfigError(
                f"--learner {self.name} needs servers that run already, because the trainer pushes its weights into "
                f"them: give {wanted}."
            )
        if settings.model.lora_experts:
            raise ConfigError(
                f"--lora-experts belongs to a learner of this program; with --learner {self.name} the trainer chooses "
                "what it trains."
            )
        if settings.custom_loss is not None:
            raise ConfigError(
                f"--custom-loss-function-path belongs to a learner of this program; with --learner {self.name} the "
                "trainer has its own loss."
            )

    def capabilities(self, settings: EngineSettings) -> LearnerCapabilities:
        return LearnerCapabilities(writes=frozenset(), undo=False, alternatives=False)

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, sampler: Sampler) -> Learner:
        raise EngineUnavailable(f"--learner {self.name} trains outside this program, so there is no learner here.")


LEARNER = OutsideLearnerFactory()
