"""How fast a client may ask."""


class TokenBucket:
    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate  # tokens a second
        self.burst = burst  # tokens that it holds at most; it begins full
        self.level = burst
        self.last = now

    def take(self, cost: float, now: float) -> float:
        """0 when the cost was taken, else the seconds until it could be; nothing is taken then."""
        # begin answer
        if cost > self.burst:
            raise ValueError(f"{cost} tokens never fit into a bucket of {self.burst}")
        passed = max(now - self.last, 0.0)
        self.level = min(self.burst, self.level + self.rate * passed)
        self.last = max(now, self.last)
        if cost <= self.level:
            self.level -= cost
            return 0.0
        return (cost - self.level) / self.rate
        # end answer
