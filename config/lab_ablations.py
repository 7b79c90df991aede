question = 'What does each part buy?'
# Trains each variant with three seeds. All change one part, except for GPT-2 and "no norm, a tenth of the rate".
#   python bench.py config/lab.py config/lab_ablations.py --dataset=my_text.txt
# Answer (AMD, AVX2): no position: +0.243, SiLU instead of SwiGLU +0.090, one head of keys +0.034, no norms +0.024, and
# post-norm -0.030, with standard deviations of 0.005 to 0.017 over seeds.
what = 'compare'
out_dir = 'out/lab_ablations'
variants = f'''
as it is:
no norm: config/ablate_no_norm.py
no norm, a tenth of the rate: config/ablate_no_norm.py --learning_rate={learning_rate / 10:g}
post-norm: config/ablate_post_norm.py
no position: config/ablate_nope.py
SiLU MLP, same size: config/ablate_silu.py
one head of keys for all: config/ablate_gqa.py
tied weights: config/ablate_tied.py
QK-norm: config/ablate_qk_norm.py
GPT-2: config/ablate_gpt2.py
Muon: config/ablate_muon.py
'''
