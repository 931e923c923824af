"""``rank_server`` with the stand-in for Transformer Engine, which must be there before Megatron is imported."""

import te_stand_in

te_stand_in.install()

import rank_server  # noqa: E402

if __name__ == "__main__":
    rank_server.main()
