question = 'How high may the learning rate be?'
# Tries rates from far too low to far too high, with three seeds.
#   python bench.py config/lab.py config/lab_lr.py --dataset=my_text.txt
# Answer (AMD, AVX2): 5e-3 and 1e-2 are best (3.138 and 3.147, each with a standard deviation of 0.011 over seeds). 1e-3
# costs 0.47, 1e-1 costs 1.03, with a standard deviation of 0.34, and 10 diverges.
what = 'compare'
out_dir = 'out/lab_lr'
picture = 'learning_rate'
variants = ''
for _rate in '5e-3 1e-4 3e-4 1e-3 3e-3 1e-2 2e-2 5e-2 1e-1 3e-1 1 10'.split():
    variants += f'rate {_rate}: --learning_rate={_rate}\n'
