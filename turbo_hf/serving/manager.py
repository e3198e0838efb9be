"""The manager of continuous batching on a patched model: Transformers' own, with the compressed cache."""

import copy
import functools
import threading
from typing import Any

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from turbo_hf.attention.masks import packed_pass
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.errors import Unsupported
from turbo_hf.graphs.devices import CudaDevice
from turbo_hf.graphs.runner import Runner
from turbo_hf.graphs.why_not import why_hooked
from turbo_hf.serving.paged_cache import Serving, TurboPagedCache
from turbo_hf.serving.runner import TurboBatchProcessor

KEPT = "_cached_continuous_batching_manager"
"""Where Transformers keeps a persistent manager on the model."""


class TurboBatchingManager(ContinuousBatchingManager):
    """Transformers' manager on compressed pages. Made by `init_continuous_batching` of a patched model.

    launched: why steps cannot be CUDA graphs; None: they can.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any,
        serving: Serving,
        launched: str | None,
    ):
        self.serving = serving
        own, cuda = copy.copy(continuous_batching_config), model.device.type == "cuda"
        if own.use_cuda_graph:
            raise Unsupported(
                f"use_cuda_graph={own.use_cuda_graph}: TurboConfig.cuda_graphs says whether passes over compressed "
                "pages are captured. Choose None or False in the ContinuousBatchingConfig, or remove the patch."
            )
        self._captures = own.use_cuda_graph is None and launched is None
        # of Transformers' own captures nothing is used
        own.use_cuda_graph = False
        if own.use_async_batching is None:
            own.use_async_batching = self._captures and cuda
        super().__init__(model, generation_config, own, workload_hints)
        _check_options(self.continuous_batching_config, cuda)
        _check_generation(generation_config, self.logit_processor, model)
        if self.distributed_helper.tp_size > 1:
            raise Unsupported(
                "continuous batching on compressed pages runs on one device, and this model is spread over "
                f"{self.distributed_helper.tp_size} processes. Use generate, or remove the patch."
            )
        serving.managers.add(self)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """The patch's attention stays. Raises: Unsupported, if another was chosen since the patch."""
        chosen = model.config.get_text_config(decoder=True)._attn_implementation
        if chosen != NAME:
            raise Unsupported(
                f"set_attn_implementation has chosen {chosen!r} since the patch: nothing would be compressed. Call "
                f'model.set_attn_implementation("{NAME}"), or remove the patch.'
            )

    def start(self) -> None:
        """See Transformers. Raises: ValueError, if another manager of the model runs."""
        if not self.is_running():
            require_none_running(self.model)
        super().start()

    def _create_batch_processor(self) -> TurboBatchProcessor:
        """As in Transformers, with a `TurboPagedCache`."""
        if isinstance(self.batch_processor, TurboBatchProcessor):
            self.batch_processor.reset()
            self.batch_processor.cache.begin_session()
            return self.batch_processor
        config, cb = self.model.config.get_text_config(), self.continuous_batching_config
        supports = getattr(self.model, "_supports_logits_to_keep", None)
        cache = TurboPagedCache(
            config, cb, self.model.device, self.model.dtype, bool(callable(supports) and supports()), self.serving
        )
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(cb, cache.num_blocks, cache.max_batch_tokens)
        if cb.scheduler_type not in SCHEDULER_MAPPING:
            raise ValueError(
                f"scheduler_type must be one of {', '.join(SCHEDULER_MAPPING)}; got {cb.scheduler_type!r}."
            )
        of_kind: Any = SCHEDULER_MAPPING[cb.scheduler_type]
        most = cb.max_requests_per_batch or 1
        scheduler = of_kind(cache=cache, safety_margin=cb.safety_margin, max_requests_per_batch=most)
        accept = scheduler.add_waiting_request
        # asynchronous batching computes a token more than it needs
        capacity = cache.capacity - bool(cb.use_async_batching)

        def add_waiting_request(state: Any) -> None:
            _require_room(state, capacity)
            self.serving.prompt_tokens += len(state.initial_tokens)
            accept(state)

        scheduler.add_waiting_request = add_waiting_request
        return TurboBatchProcessor(
            graphs=Runner(
                CudaDevice(self.model.device) if self._captures else None,
                functools.partial(why_hooked, self.model),
                self.serving.config.cuda_graphs is True,
            ),
            cache=cache,
            config=config,
            generation_config=self.generation_config,
            continuous_batching_config=cb,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )

    def _generation_step(self) -> None:
        """See Transformers."""
        processor: Any = self.batch_processor
        ios = processor.inputs_and_outputs
        # the first stream of a pass: the one for copies, where this version of Transformers has one
        stream = getattr(ios, "h2d_stream", ios.compute_stream)
        if stream is not None:
            # Transformers fills the inputs, or clears their memory, on the current stream
            stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with packed_pass():
            super()._generation_step()


def init_continuous_batching(
    serving: Serving,
    launched: str | None,
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> ContinuousBatchingManager:
    """In place of Transformers' method of that name; arguments and result as there, but for the first two.

    launched: as in `TurboBatchingManager`.

    Raises:
        Unsupported: an option that compressed pages do not support.
        ValueError: a manager of the model runs, or one from before the patch is kept on it.
    """
    kept: Any = getattr(model, KEPT, None)
    if kept is not None and kept not in serving.managers:
        raise ValueError(
            "the model keeps a manager from before the patch, whose pages are not compressed. Call "
            "model.destroy_cached_continuous_batching_manager() first."
        )
    if kept is not None:
        kept.switch_to_cb_friendly_attn(model)
        if launched is not None and kept.batch_processor is not None:
            # hooks that came later, which a replay would not call
            kept.batch_processor.model_runner.graphs.off = True
        manager: ContinuousBatchingManager = kept
        return manager
    require_none_running(model)
    chosen = generation_config or model.generation_config
    if chosen.eos_token_id is None:
        # as in Transformers, which writes it to the model's own config: no end token
        chosen = copy.deepcopy(chosen)
        chosen.eos_token_id = -1
    config = continuous_batching_config or ContinuousBatchingConfig()
    return TurboBatchingManager(model, chosen, config, workload_hints, serving, launched)


def end_managers(serving: Serving, model: Any) -> None:
    """End every manager of the patch; requests that are not finished fail, and say so."""
    for manager in list(serving.managers):
        if manager.is_running():
            manager.stop(block=True, hard_stop=True)
        manager.destroy()
        manager.batch_processor = None
    if getattr(model, KEPT, None) in serving.managers:
        delattr(model, KEPT)


def running_managers(model: Any) -> list[Any]:
    """The managers, patched or not, whose thread runs on this model."""
    owners = (getattr(getattr(thread, "_target", None), "__self__", None) for thread in threading.enumerate())
    return [x for x in owners if isinstance(x, ContinuousBatchingManager) and x.model is model]


def require_none_running(model: Any) -> None:
    """ValueError if a manager's thread runs on this model."""
    if running_managers(model):
        raise ValueError(
            "a manager of continuous batching runs on this model, and its pool takes the memory that is planned for "
            "one. Stop it first (manager.stop()), or send it your requests."
        )


def _check_options(cb: ContinuousBatchingConfig, cuda: bool) -> None:
    """Unsupported for options of Transformers that compressed pages do not support."""
    compiled = cb.varlen_compile_config is not None or cb.decode_compile_config is not None
    for name, given, instead in (
        ("use_async_batching without a GPU", cb.use_async_batching and not cuda, "False"),
        ("cpu_offload_space", cb.cpu_offload_space is None or cb.cpu_offload_space > 0, "0"),
        ("a compile config", compiled, "none"),
    ):
        if given:
            raise Unsupported(
                f"continuous batching on compressed pages does not support {name}. Choose {instead} in the "
                "ContinuousBatchingConfig, or remove the patch."
            )


def _check_generation(generation: GenerationConfig, processors: Any, model: Any) -> None:
    """Unsupported for what Transformers' continuous batching would pass over, or fail at in the first pass."""
    for name, given in (("num_beams", (generation.num_beams or 1) > 1), ("stop_strings", generation.stop_strings)):
        if given:
            raise Unsupported(f"continuous batching does not know {name}. Leave it out, or use generate.")
    tokens = torch.zeros(2, dtype=torch.int32, device=model.device)
    scores = torch.zeros(2, model.config.get_text_config().vocab_size, device=model.device)
    for processor in processors.logits_processor:
        own = isinstance(processor, ContinuousBatchingLogitsProcessor)
        if own or getattr(processor, "supports_continuous_batching", None) is not None:
            continue
        try:
            processor(tokens, scores)
        except Exception as error:
            raise Unsupported(
                f"continuous batching shows logits processors the newest token of each request alone, with which "
                f"{type(processor).__name__} fails ({error}). Leave it out, or use generate."
            ) from error


def _require_room(state: Any, capacity: int) -> None:
    """ValueError unless a request fits into the pool with all that it may generate."""
    prompt, most = len(state.initial_tokens), state.max_new_tokens
    if not prompt:
        raise ValueError("a request needs at least one token; got an empty prompt.")
    if most is None:
        raise ValueError("a request needs max_new_tokens, without which nobody knows how long it gets; got None.")
    if prompt + most - 1 > capacity:
        raise ValueError(
            f"a request of {prompt} tokens that may generate {most} more does not fit: the pool holds {capacity} "
            "tokens. Lower max_new_tokens, or plan more memory (num_blocks, max_memory_percent)."
        )
