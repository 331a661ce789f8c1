"""Creates a sampling client from a policy's record.

Tinker keeps weights to sample from under a path of their own. A server that samples from the adapter that it trains
(`traits`) gets further adapters, which are never trained: each policy is loaded into one of them from the learner's
saved state.
"""

import asyncio
import logging
from typing import Any

from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import Connection
from openclaw_rl.engines.tinker.errors import CallFailed, Kind, read
from openclaw_rl.engines.tinker.record import PolicyRecord
from openclaw_rl.engines.tinker.run import new_name, result

log = logging.getLogger(__name__)

#: Adapters that policies are loaded into in turn, so that a new policy does not disturb requests on the one before.
STAND_INS = 2


class PolicyLoader:
    """Creates sampling clients."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._stand_ins: list[Any] = []
        """Adapters for policies, the least recently loaded first."""
        self._using = asyncio.Lock()

    async def open(self, record: PolicyRecord) -> Any:
        """A client that samples from a policy. Raises CallFailed and the errors of the SDK."""
        path = record.sampler
        if path is None or self.connection.traits.samples_over_training:
            path = await self._copy(record)
        return await self.connection.service.create_sampling_client_async(model_path=path)

    async def _copy(self, record: PolicyRecord) -> str:
        if record.state is None:
            raise CallFailed(Kind.REFUSED, "load the policy", "its state was not saved with it")
        async with self._using:
            adapter = await self._with_weights(record, record.state)
            saved = await result(adapter.save_weights_for_sampler_async(new_name("served")))
            self._stand_ins.append(adapter)
            path: str = saved.path
            return path

    async def _with_weights(self, record: PolicyRecord, state: str) -> Any:
        """An adapter with a state loaded; an adapter that fails to load it is not used again."""
        if len(self._stand_ins) == STAND_INS:
            adapter = self._stand_ins.pop(0)
            try:
                await result(adapter.load_state_async(state))
                return adapter
            except sdk.failures() as error:
                # A server that was restarted has lost all of them.
                log.warning("Creating an adapter to sample from again: %s", read(error).words)
                self._stand_ins.clear()
        adapter = await self.connection.service.create_lora_training_client_async(
            base_model=record.base_model, rank=record.rank
        )
        await result(adapter.load_state_async(state))
        return adapter
