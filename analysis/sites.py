"""Which layers are measured: module path <-> (block, attention, projection), and the norm behind q and k.

A *site* is one linear layer that a preset's pattern names. The pattern is a regular expression with the named groups
`block`, `attention` and `projection`; groups that a model has no use for may be missing.

    sites = find_sites(model, PRESETS["matrix-game-3"])
    sites[0]      # Site(name='blocks.0.self_attn.q', block=0, attention='self', projection='q', norm='blocks.0...')
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

WRAPPERS = re.compile(r"(^|\.)(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_ROLES = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "query": "q", "key": "k", "value": "v"}
_ROLES |= {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "output.dense": "o"}
_ATTENTIONS = {"self_attn": "self", "cross_attn": "cross", "attn1": "self", "attn2": "cross", "attn": "self"}
_ATTENTIONS |= {"attention": "self", "crossattention": "cross"}


@dataclass(frozen=True)
class SitePattern:
    """A preset. `norm` is a format string for the path of the norm behind q and k, '' where there is none."""

    name: str
    regex: str
    norm: str = ""


@dataclass(frozen=True)
class Site:
    """One measured layer. `block` is -1 and `attention`/`projection` are '' where the pattern does not tell."""

    name: str
    block: int
    attention: str  # 'self', 'cross' or ''
    projection: str  # 'q', 'k', 'v', 'o' or ''
    norm: str  # path of the RMSNorm behind it, '' where there is none


_WAN = SitePattern(
    "matrix-game-3",
    r"(?:.*\.)?blocks\.(?P<block>\d+)\.(?P<attention>self_attn|cross_attn)\.(?P<projection>[qkvo])",
    norm="{parent}.norm_{projection}",
)
PRESETS: dict[str, SitePattern] = {
    "matrix-game-3": _WAN,
    "wan": SitePattern("wan", _WAN.regex, _WAN.norm),
    "diffusers": SitePattern(
        "diffusers",
        r"(?:.*\.)?(?:transformer_)?(?:blocks|layers)\.(?P<block>\d+)\.(?:.*\.)?(?P<attention>attn[12]?)\."
        r"(?P<projection>to_q|to_k|to_v|to_out\.0)",
        norm="{parent}.norm_{projection}",
    ),
    "hf-bert": SitePattern(
        "hf-bert",
        r"(?:.*\.)?layer\.(?P<block>\d+)\.(?P<attention>attention|crossattention)\."
        r"(?:self\.)?(?P<projection>query|key|value|output\.dense)",
    ),
    "hf-llama": SitePattern(
        "hf-llama",
        r"(?:.*\.)?layers\.(?P<block>\d+)\.(?P<attention>self_attn)\.(?P<projection>[qkvo]_proj)",
        norm="{parent}.{projection}_norm",
    ),
}


def preset(name: str) -> SitePattern:
    """The preset called `name`; ValueError lists the known ones."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}. Or give a regular expression.")
    return PRESETS[name]


def clean_name(path: str) -> str:
    """Module path without the wrappers of compile, DDP and FSDP: '_orig_mod.module.blocks.0.q' -> 'blocks.0.q'."""
    while True:
        stripped = WRAPPERS.sub("", path).lstrip(".")
        if stripped == path:
            return path
        path = stripped


def parse_site(path: str, pattern: SitePattern) -> Site | None:
    """The site at a module path, None where the pattern does not match the whole (cleaned) path."""
    name = clean_name(path)
    match = re.fullmatch(pattern.regex, name)
    if match is None:
        return None
    groups = match.groupdict()
    role, attention = groups.get("projection") or "", groups.get("attention") or ""
    projection = _ROLES.get(role, role)
    norm = ""
    if pattern.norm and projection in ("q", "k"):
        parent = name.removesuffix("." + role)
        norm = pattern.norm.format(parent=parent, projection=projection)
    return Site(name, int(groups.get("block") or -1), _ATTENTIONS.get(attention, attention), projection, norm)


def find_sites(model: Any, pattern: SitePattern) -> dict[Site, Any]:
    """Every measured layer of a torch model, in module order: {Site: its module}. A shared module counts once.

    Raises:
        ValueError: nothing matches (the message shows linear layers that exist), or a match is not a linear layer.
    """
    found: dict[Site, Any] = {}
    linears = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_linear = hasattr(module, "in_features") and getattr(weight, "ndim", 0) == 2
        if is_linear:
            linears.append(clean_name(path))
        site = parse_site(path, pattern)
        if site is None:
            continue
        if not is_linear:
            raise ValueError(
                f"pattern {pattern.name!r} matches {site.name!r}, a {type(module).__name__}, not a linear layer; "
                "narrow the pattern to layers with a [out, in] weight"
            )
        found[site] = module
    if not found:
        shown = ", ".join(linears[:6]) + (", ..." if len(linears) > 6 else "")
        raise ValueError(
            f"no layer matches {pattern.name!r} ({pattern.regex}); the model's linear layers are: {shown or 'none'}"
        )
    return found
