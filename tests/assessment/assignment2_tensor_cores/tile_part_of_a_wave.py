"""Step 4: a wave may be a part of one"""

STEP, HINT = 4, "waves"


def best_tile(m: int, n: int, tiles: list[Tile], sms: int) -> tuple[Tile, float]:
    def rate(tile: Tile) -> float:
        count = -(-m // tile.m) * -(-n // tile.n)
        return tile.share * m * n / (count * tile.m * tile.n)

    best = max(tiles, key=rate)
    return best, rate(best)
