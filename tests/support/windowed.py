"""The plain policies in a sliding window: what no later query sees is forgotten before a decision, and competes not."""

from tests.support import slow_policies
from tests.support.slow_policies import Row, attention_row


class Layer(slow_policies.Layer):
    """As there; a token leaves when the next query does not see it, and stays in the softmax of those that did."""

    def arrive(self, tokens: list[int]) -> None:
        """Forget what the first of these does not see."""
        self.forget(tokens[0])
        super().arrive(tokens)

    def evict(self) -> None:
        """Forget what the next token will not see."""
        self.before = self.held
        self.forget(self.newest + 1)
        super().evict()

    def forget(self, query: int) -> None:
        if self.window is not None:
            self.held = [[t for t in mine if query - t < self.window] for mine in self.held]

    def observed(self, head: int, last: int) -> dict[int, list[Row]]:
        """Rows of the last queries on the keys that are held until the decision, by query head."""
        mine, first = self.before[head], max(0, self.newest + 1 - last)
        return {
            h: [
                attention_row(self.q[h], self.k[head], i, mine, self.scaling, self.window)
                for i in range(first, self.newest + 1)
            ]
            for h in self.members(head)
        }
