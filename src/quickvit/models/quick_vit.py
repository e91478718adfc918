"""Quick ViTs: lift → octic blocks → invariant or break → standard blocks → head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from timm.layers import LayerNorm, global_pool_nlc
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quickvit.group import D2, D8, DihedralGroup, Element, act_on_tokens
from quickvit.layers import (
    INVARIANTS,
    FreeLift,
    InvariantTokens,
    OcticBlock,
    OcticDropout,
    OcticInvariant,
    OcticLift,
    OcticLinear,
    OcticPosition,
    Pending,
    StandardAttention,
    StandardBlock,
)
from quickvit.layers.block import hands_over, takes_pending
from quickvit.layers.hooks import has_hooks
from quickvit.layers.linear import STANDARD_STD
from quickvit.models.declared import LABELS, declare, declared
from quickvit.ops.packing import Shapes, pack, unpack

POOLS = ("token", "avg", "avgmax", "max", "")
# The smallest value of arguments that count something.
_LEAST = {
    "patch_size": 1,
    "in_chans": 1,
    "num_classes": 0,
    "embed_dim": 1,
    "depth": 0,
    "num_heads": 1,
    "reg_tokens": 0,
    "pos_grid": 1,
}
_layer_norm: Any = partial(LayerNorm, eps=1e-6)


@dataclass(frozen=True)
class Family:
    """What a family does with the symmetry."""

    group: DihedralGroup
    invariant: bool
    full_depth: bool
    summary: str


FAMILIES: dict[str, Family] = {
    "d8": Family(D8, invariant=True, full_depth=True, summary="octic to the end, then invariant"),
    "i8": Family(D8, invariant=True, full_depth=False, summary="invariant after the octic blocks"),
    "h8": Family(D8, invariant=False, full_depth=False, summary="equivariance broken after the octic blocks"),
    "h2": Family(D2, invariant=False, full_depth=False, summary="mirror equivariance, broken half-way"),
}
"""The families by their names."""


@dataclass(frozen=True)
class SteerableTokens:
    """Steerable tokens [B, prefix + H·W, C] with what is needed to act on them."""

    tokens: Tensor
    grid: tuple[int, int]
    prefix: int
    group: DihedralGroup

    def act(self, g: Element) -> SteerableTokens:
        """The tokens that the transformed image has: (ρ_token ⊗ ρ_chan)(g)."""
        tokens = act_on_tokens(self.tokens, g, self.grid, self.group, prefix=self.prefix)
        height, width = self.grid
        turned = self.group == D8 and g.turns % 2
        return SteerableTokens(tokens, (width, height) if turned else self.grid, self.prefix, self.group)


class QuickVisionTransformer(nn.Module, PyTorchModelHubMixin, library_name="quickvit"):
    """A vision transformer whose first blocks commute with the rotations and mirrorings of a square.

    Arguments that timm's VisionTransformer has mean the same here. The others:

    family: what happens to the symmetry, one of `FAMILIES`.
    octic_depth: the paper's k, the number of octic blocks; half the depth by default, all of it for d8.
    invariant: how steerable features become invariant (d8 and i8), one of `quickvit.layers.INVARIANTS`.
    drop_path_subset: in training, compute residual branches for those samples alone that stochastic depth keeps, and
    keep the same number each time. Faster above a drop_path_rate of 0.1.
    mask_token: learn a token that replaces hidden patches in `forward_features(x, mask)`.
    pos_grid: side of the square grid on which positions are learned; the image's own by default.
    lift: "octic", or "free" for the paper's ablation without symmetry in the patch embedding (h8 and h2).
    released_norm: the layer norm that the authors' released weights were trained with.
    released_init: weights of octic linear layers start with the standard deviation 0.02 of standard ones, as in the
        released code, instead of one that gives their outputs the same variance.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        init_values: float | None = None,
        class_token: bool = True,
        reg_tokens: int = 0,
        fc_norm: bool | None = None,
        dynamic_img_size: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        uniform_drop_path: bool = False,
        drop_path_subset: bool = False,
        family: str = "h8",
        octic_depth: int | None = None,
        invariant: str = "power_spectrum",
        lift: Literal["octic", "free"] = "octic",
        mask_token: bool = False,
        pos_grid: int | None = None,
        released_norm: bool = False,
        released_init: bool = False,
    ) -> None:
        num_classes, patch_size = index(num_classes), _side(patch_size)
        # JSON, and so a checkpoint, knows no numbers of NumPy.
        config = {name: _plain(v) for name, v in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.config: dict[str, Any] = config
        # What the Hub's mixin saves: the same dictionary, so that it follows every change.
        self._hub_mixin_config = config
        kind = _family(family)
        for name, least in _LEAST.items():
            value = config[name]
            _require(value is None or value >= least, f"{name} must be {least} or more, got {value}")
        for name in ("drop_path_rate", "attn_drop_rate"):
            _require(0 <= config[name] <= 1, f"{name} must lie between 0 and 1, got {config[name]}")
        _require(global_pool in POOLS, f"global_pool must be one of {POOLS}, got {global_pool!r}")
        _require(class_token or global_pool != "token", "global_pool='token' needs class_token=True")
        _require(
            invariant in INVARIANTS,
            f"unknown invariant {invariant!r}; expected one of {', '.join(INVARIANTS)}",
        )
        _require(lift in ("octic", "free"), f"lift must be 'octic' or 'free', got {lift!r}")
        _require(
            lift == "octic" or not kind.invariant, f"a free lift breaks the invariance that {family} promises"
        )
        if octic_depth is None:
            octic_depth = depth if kind.full_depth else depth // 2
        _require(0 <= octic_depth <= depth, f"octic_depth must be between 0 and {depth}, got {octic_depth}")
        _require(
            not kind.full_depth or octic_depth == depth,
            f"{family} is octic in all {depth} blocks, got octic_depth {octic_depth}; use i8 for fewer",
        )
        group = kind.group

        self.family = family
        self.group = group
        self.octic_depth = octic_depth
        # False once the model was pruned within its octic part.
        self.leaves_octic = True
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.embed_dim = self.num_features = self.head_hidden_size = embed_dim
        self.has_class_token, self.num_reg_tokens = class_token, reg_tokens
        self.num_prefix_tokens = int(class_token) + reg_tokens
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False
        self.patch_size = patch_size
        self.set_input_size(img_size)

        self.patch_embed: OcticLift | FreeLift
        if lift == "octic":
            self.patch_embed = OcticLift(patch_size, in_chans, embed_dim, group)
        else:
            self.patch_embed = FreeLift(patch_size, in_chans, embed_dim)
        self.pos_embed = OcticPosition(pos_grid or max(self.grid_size), embed_dim, group)
        self.cls_token = InvariantTokens(1, embed_dim, group=group) if class_token else None
        self.reg_token = InvariantTokens(reg_tokens, embed_dim, group=group) if reg_tokens else None
        self.mask_token = InvariantTokens(1, embed_dim, std=0.0, group=group) if mask_token else None
        self.pos_drop = OcticDropout(embed_dim, pos_drop_rate, group)

        if uniform_drop_path:
            rates = [drop_path_rate] * depth
        else:
            rates = [drop_path_rate * i / max(1, depth - 1) for i in range(depth)]
        shared: dict[str, Any] = {
            "num_heads": num_heads,
            "mlp_ratio": mlp_ratio,
            "qkv_bias": qkv_bias,
            "init_values": init_values,
            "proj_drop": proj_drop_rate,
            "attn_drop": attn_drop_rate,
        }
        # The released models keep PyTorch's default ε in their octic norms.
        octic = {**shared, "norm_eps": 1e-5 if released_norm else 1e-6, "released_norm": released_norm}
        self.blocks = nn.ModuleList(
            OcticBlock(embed_dim, drop_path=rate, group=group, **octic) for rate in rates[:octic_depth]
        )
        self.blocks.extend(
            StandardBlock(
                embed_dim, drop_path=rate, norm_layer=_layer_norm, attn_layer=StandardAttention, **shared
            )
            for rate in rates[octic_depth:]
        )
        for block in self.blocks:
            assert isinstance(block, OcticBlock | StandardBlock)
            block.drop_path_subset = drop_path_subset
        self.invariant = OcticInvariant(embed_dim, invariant, group) if kind.invariant else None
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)
        ]

        use_fc_norm = global_pool not in ("token", "") if fc_norm is None else fc_norm
        self.norm = nn.Identity() if use_fc_norm else _layer_norm(embed_dim)
        self.fc_norm = _layer_norm(embed_dim) if use_fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self._init_weights()

    def _init_weights(self) -> None:
        """Let those weights start otherwise whose layers do not know how."""
        for module in (*self.blocks[self.octic_depth :], self.head):
            module.apply(_init_standard)
        if self.config["released_init"]:
            for module in self.blocks.modules():
                if isinstance(module, OcticLinear):
                    module.reset_parameters(matched=False)

    # ------------------------------------------------------------------ timm's contract

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Let all weights start anew: those of a model of the meta device have no values after `to_empty`."""
        # Parts before their whole, which may want another start than they do.
        for module in reversed([*self.modules()]):
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        self._init_weights()

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters that keep their size: positions and learned tokens."""
        return {f"{name}.weight" for name in ("pos_embed", "cls_token", "reg_token", "mask_token")}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:  # noqa: ARG002
        """Patterns that sort parameters into layers, for layer-wise learning rates."""
        # The invariant belongs to the last octic block: it is the next thing that the data meets.
        last = (max(self.octic_depth - 1, 0),)
        blocks: list[tuple[str, tuple[int, ...] | None]] = [(r"^blocks\.(\d+)", None)]
        blocks += [(r"^invariant", last), (r"^norm", (99999,))]
        return {"stem": r"^cls_token|^reg_token|^mask_token|^pos_embed|^patch_embed", "blocks": blocks}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory: recompute each block in the backward pass."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head; 0 classes remove it."""
        num_classes = index(num_classes)
        _require(num_classes >= 0, f"num_classes must be 0 or more, got {num_classes}")
        if global_pool is not None:
            _require(global_pool in POOLS, f"global_pool must be one of {POOLS}, got {global_pool!r}")
            _require(
                global_pool != "token" or self.cls_token is not None, "this model has no class token to pool"
            )
            self.global_pool = self.config["global_pool"] = global_pool
            # The norms stay where they are, whatever a new model with this pooling would do.
            self.config["fc_norm"] = not isinstance(self.fc_norm, nn.Identity)
        self.num_classes = self.config["num_classes"] = num_classes
        if LABELS in declared(self):
            declare(self, **{LABELS: None})
        reference = next(self.patch_embed.parameters())
        head = nn.Linear(self.embed_dim, num_classes) if num_classes else nn.Identity()
        self.head = head.apply(_init_standard).to(reference.device, reference.dtype).train(self.training)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Expect another image size from now on; the positions are resized to it in the forward pass."""
        if isinstance(patch_size, tuple):
            patch_size = patch_size[0] if patch_size[0] == patch_size[1] else 0
        if patch_size not in (None, self.patch_size):
            raise ValueError(f"the patch size is fixed at {self.patch_size}, cannot make it {patch_size}")
        if img_size is not None:
            size = tuple(map(index, img_size)) if isinstance(img_size, Sequence) else 2 * (index(img_size),)
            self.grid_size = self._grid(*size)
            self.img_size = self.config["img_size"] = size
            if hasattr(self, "pos_embed"):
                self.config["pos_grid"] = self.pos_embed.grid_size
            if declared(self):
                declare(self, input_size=(self.in_chans, *size))

    # ------------------------------------------------------------------ the Hub's contract

    def _save_pretrained(self, save_directory: Path) -> None:
        from quickvit.models.checkpoints import save_checkpoint  # it imports this module

        save_checkpoint(self, save_directory / SAFETENSORS_SINGLE_FILE)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        config: dict[str, Any] | None = None,
        map_location: str = "cpu",
        strict: bool = True,
        **options: Any,
    ) -> QuickVisionTransformer:
        """Load from a folder or from the Hub; unlike in the mixin, a mismatch is an error.

        `config` is the content of config.json; `options` are the arguments of the download and of the model.
        """
        from quickvit.models.checkpoints import read_checkpoint, restore  # they import this module

        download = {
            name: options.pop(name) for name in signature(hf_hub_download).parameters if name in options
        }
        folder = Path(model_id)
        file = folder / SAFETENSORS_SINGLE_FILE
        if not folder.is_dir():
            file = Path(hf_hub_download(model_id, SAFETENSORS_SINGLE_FILE, **download))
        state, inside = read_checkpoint(file)
        changed = {name: value for name, value in options.items() if not config or config.get(name) != value}
        # The file also says how images are prepared.
        config = {**(inside or {}), **config} if config else inside
        return restore(config, state, str(file), strict, cls, **changed).to(map_location).eval()

    # ------------------------------------------------------------------ forward

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, in_chans, H, W] → logits [B, num_classes].

        Where the head takes the class token, the other tokens end with the last block: neither the invariant of a d8
        nor the last norm is computed for them, unless a hook or a subclass may look at them.
        """
        if self.global_pool != "token" or self._tokens_are_seen():
            return self.forward_head(self.forward_features(x))
        x, _ = self._embed(x)
        x, _ = self._run(x, first=1)
        return self.forward_head(self.norm(x))

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images → normalised tokens [B, prefix + H·W, C]; `mask` [B, H·W] hides patches behind the mask token."""
        x, _ = self._embed(x, mask)
        return self.norm(self._run(x)[0])

    def forward_crops(
        self,
        crops: Sequence[Tensor],
        masks: Sequence[Tensor | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """`forward_features` of batches of images of several sizes, in one pass of all their tokens.

        `dtype` is that of the residual stream; by default what positions have, float32 under autocast.
        """
        x, shapes = self._embed_crops(crops, [None] * len(crops) if masks is None else masks, dtype)
        return unpack(self.norm(self._run(x, shapes=shapes)[0]), shapes)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Tokens [B, N, C] → [B, C] by class token or average; '' keeps the tokens."""
        pool_type = self.global_pool if pool_type is None else pool_type
        return global_pool_nlc(x, pool_type=pool_type, num_prefix_tokens=self.num_prefix_tokens)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Normalised tokens → logits, or the pooled features before the head."""
        x = self.head_drop(self.fc_norm(self.pool(x)))
        return x if pre_logits else self.head(x)

    def forward_steerable(self, x: Tensor, depth: int | None = None) -> SteerableTokens:
        """Images → steerable tokens after `depth` octic blocks (all of them by default), with the action on them.

        model.forward_steerable(act_on_image(x, g)).tokens equals model.forward_steerable(x).act(g).tokens.
        """
        depth = self.octic_depth if depth is None else depth
        _require(
            0 <= depth <= self.octic_depth, f"depth must be between 0 and {self.octic_depth}, got {depth}"
        )
        x, grid = self._embed(x)
        for block in self.blocks[:depth]:
            x = self._call(block, x)
        return SteerableTokens(x, grid, self.num_prefix_tokens, self.group)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """timm's access to the tokens after chosen blocks; those before the last octic block are steerable."""
        _require(output_fmt in ("NCHW", "NLC"), f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.blocks), indices)
        if norm and not self.leaves_octic:
            raise ValueError(
                f"norm=True is for tokens that left the octic part; the {len(self.blocks)} blocks that pruning left "
                f"are all steerable"
            )
        if norm and min(take) < self.octic_depth - 1:
            raise ValueError(
                f"norm=True is for tokens that left the octic part; block {min(take)} is steerable, take blocks "
                f"from {max(self.octic_depth - 1, 0)} on"
            )
        x, grid = self._embed(x)
        x, taken = self._run(x, take, last + 1 if stop_early else None)
        if norm:
            taken = [self.norm(y) for y in taken]
        prefix = [y[:, : self.num_prefix_tokens] for y in taken]
        patches = [y[:, self.num_prefix_tokens :] for y in taken]
        if output_fmt == "NCHW":
            patches = [y.unflatten(1, grid).permute(0, 3, 1, 2).contiguous() for y in patches]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        outputs = list(zip(patches, prefix, strict=True)) if with_prefix else patches
        return outputs if intermediates_only else (self.norm(x), outputs)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Any]:
        """DINOv2's access to the last n layers, or to the layers with these indices."""
        return self.forward_intermediates(
            x,
            n if isinstance(n, int) else list(n),
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
        )

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last index, and the head."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if last + 1 < self.octic_depth:
            self.octic_depth = last + 1
            self.leaves_octic = False
            self.invariant = None
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return take

    # ------------------------------------------------------------------ parts

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        if height % self.patch_size or width % self.patch_size or not height or not width:
            raise ValueError(
                f"an image of {height}×{width} pixels is not divisible into patches of {self.patch_size}"
            )
        return height // self.patch_size, width // self.patch_size

    def _embed(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        """Images → steerable tokens with positions and prefix, and the grid of the patches."""
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise ValueError(f"got images of shape {tuple(x.shape)}, expected [B, {self.in_chans}, H, W]")
        height, width = x.shape[-2:]
        if not self.dynamic_img_size and (height, width) not in (self.img_size, self.img_size[::-1]):
            expected = "×".join(map(str, self.img_size))
            raise ValueError(
                f"got an image of {height}×{width} pixels, expected {expected}; call set_input_size() or create the "
                f"model with img_size or dynamic_img_size=True"
            )
        grid = self._grid(height, width)
        x = self.patch_embed(x).flatten(1, 2)
        if mask is not None:
            if self.mask_token is None:
                raise ValueError("this model has no mask token; create it with mask_token=True")
            if mask.shape != x.shape[:2]:
                raise ValueError(
                    f"got a mask of shape {tuple(mask.shape)}, expected one value per patch, {tuple(x.shape[:2])}"
                )
            x = torch.where(mask.unsqueeze(-1), self.mask_token().to(x.dtype), x)
        x = x + self.pos_embed(*grid).flatten(0, 1)
        prefix = [tokens() for tokens in (self.cls_token, self.reg_token) if tokens is not None]
        if prefix:
            first = torch.cat(prefix).to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat([first, x], dim=1)
        return self.pos_drop(x), grid

    def _embed_crops(
        self, crops: Sequence[Tensor], masks: Sequence[Tensor | None], dtype: torch.dtype | None
    ) -> tuple[Tensor, Shapes]:
        x, shapes = pack([self._embed(crop, mask)[0] for crop, mask in zip(crops, masks, strict=True)])
        return x.to(dtype or x.dtype), shapes

    def _tokens_are_seen(self) -> bool:
        """Whether somebody else's code meets the tokens after the last block.

        Hooks of all modules do not count: those that count FLOPs should see what is computed without them.
        """
        methods = ("forward_features", "forward_head", "pool")
        own = (getattr(type(self), name) is getattr(QuickVisionTransformer, name) for name in methods)
        if not all(own) or any(name in self.__dict__ for name in methods):
            return True
        after = [self.norm] if self.invariant is None else [self.norm, *self.invariant.modules()]
        changed = any(has_hooks(module) or "forward" in module.__dict__ for module in after)
        return changed or not isinstance(self.norm, nn.LayerNorm | nn.Identity)

    def _leave(self, x: Tensor) -> Tensor:
        """Leave the octic part: by the invariant, or (hybrids) by simply reading the channels as standard ones."""
        return x if self.invariant is None else self.invariant(x).to(x.dtype)

    def _run(
        self,
        x: Tensor,
        take: Sequence[int] = (),
        stop: int | None = None,
        shapes: Shapes | None = None,
        first: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens through the first `stop` blocks; also the tokens after the blocks in `take`.

        Sequences of several `shapes` are packed into one tensor. `first`: how many tokens are wanted in the end.
        """
        taken: list[Tensor] = []
        pending: Pending | None = None
        blocks = self.blocks[:stop]
        # Whoever takes blocks from the end shortens the octic part, and leaves it all the same.
        octic_depth = min(self.octic_depth, len(self.blocks))
        packed = {} if shapes is None else {"shapes": shapes}
        if octic_depth == 0:
            x = self._leave(x)
        for i, block in enumerate(blocks):
            if i < octic_depth and isinstance(block, StandardBlock):
                raise ValueError(
                    f"block {i} is a standard one, but octic_depth says {self.octic_depth} octic ones"
                )
            if i < octic_depth and takes_pending(block):
                # The next norm adds this block's last branch in its own pass, unless somebody looks at x before.
                last = i + 1 == min(octic_depth, len(blocks))
                defer = not (last or i in take) and hands_over(block, blocks[i + 1])
                out = self._call(block, x, pending, defer=defer, **packed)
                x, pending = out if defer else (out, None)
            else:
                x = self._call(block, x, **packed)
            if i + 1 == len(blocks):
                x = x[:, :first]
            if i + 1 == octic_depth:
                x = self._leave(x)
            if i in take:
                taken.append(x)
        return x, taken

    def _call(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False, **kwargs)
        return block(*args, **kwargs)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _family(name: str) -> Family:
    _require(name in FAMILIES, f"unknown family {name!r}; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _side(patch_size: int | tuple[int, int]) -> int:
    if isinstance(patch_size, int):
        return patch_size
    height, width = patch_size
    _require(height == width, f"patches must be square, got patch_size {height}×{width}")
    return height


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _init_standard(module: nn.Module) -> None:
    """timm's initialisation of a standard ViT."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=STANDARD_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
