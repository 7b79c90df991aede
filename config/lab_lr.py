# How high may the learning rate be? The rates of a course's exercise and outward until it is of no use, three seeds; a range test
# asks the same in one short run: python train.py config/lab.py config/find_lr.py
#   python bench.py config/lab.py config/lab_lr.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_lr'
arms = '\n'.join(f'rate {rate}: --learning_rate={rate}' for rate in (
    '5e-3', '1e-4', '3e-4', '1e-3', '3e-3', '1e-2', '2e-2', '5e-2', '1e-1', '3e-1', '1', '10'))
