"""Methods with options for tests."""

from openclaw_rl.methods.base import Method
from openclaw_rl.methods.options import MethodOptions, TopK
from openclaw_rl.methods.registry import make_method


def a_method(name: str, **options: object) -> Method:
    """A built-in method with some options; the others have their defaults."""
    return make_method(MethodOptions(method=name, **options))


def topk_method(topk: TopK, w_opd: float = 1.0, w_rl: float = 1.0, **options: object) -> Method:
    """topk-select with these settings."""
    return a_method(
        "topk-select",
        w_opd=w_opd,
        w_rl=w_rl,
        topk_k=topk.k,
        topk_max_cand=topk.candidates,
        topk_hint_selection=topk.selection,
        topk_subset_mode=topk.subset,
        topk_adv_diff_clip=topk.clip,
        **options,
    )
