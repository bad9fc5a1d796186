"""Competition mathematics: DeepScaleR and the evaluation sets as Tandem-RLVR has them, and HardVerify-Math."""
