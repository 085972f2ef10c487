import time
from command import *
def test_a(recipe, tmp_path):
    for i in range(3):
        t=time.time(); r=train(recipe, tmp_path, "trainer.max_steps=4"); print("T", time.time()-t, r)
    print((r/"metrics.csv").read_text()); 
def test_b(recipe, tmp_path):
    t=time.time(); r=train(recipe, tmp_path, "train=gates+lora","trainer.max_steps=4","trainer.val_every=2"); print("T", time.time()-t, r)
    print((r/"metrics.csv").read_text()); 
    t=time.time(); resume(r); print("T", time.time()-t, r)
    print((r/"metrics.csv").read_text()); 
