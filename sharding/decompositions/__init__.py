"""Operations in pieces that can be split."""
