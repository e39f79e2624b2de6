"""Which rank talks to which. Ranks of a connector's group are FFN ranks first, then Attention ranks."""

from dataclasses import dataclass

from afd_runtime.config import AFDConfig, Role


@dataclass(frozen=True, slots=True)
class Topology:
    num_attention: int
    num_ffn: int

    @property
    def size(self) -> int:
        return self.num_ffn + self.num_attention

    def rank(self, role: Role, index: int) -> int:
        """Rank in the group of the index-th process of a role."""
        return index if role == "ffn" else self.num_ffn + index

    def ffn_of(self, attention: int) -> int:
        """Index of the FFN process that serves an Attention process: contiguous blocks of equal size, or one off."""
        return attention * self.num_ffn // self.num_attention

    def attention_of(self, ffn: int) -> tuple[int, ...]:
        """Indices of the Attention processes that an FFN process serves, in the order it receives from them."""
        return tuple(index for index in range(self.num_attention) if self.ffn_of(index) == ffn)


def topology_of(config: AFDConfig) -> Topology:
    return Topology(config.num_attention_ranks, config.num_ffn_ranks)
