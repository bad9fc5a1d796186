"""Questions about documents: MuSiQue as rlvr has it, HotpotQA and 2WikiMultiHopQA in its form; rlvr's rewards."""
