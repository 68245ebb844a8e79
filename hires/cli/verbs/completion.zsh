#compdef hires
_hires() {
    local -a found
    found=("${(@f)$(${words[1]} _complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -Q -S '' -- ${(M)found:#*=}
    compadd -Q -- ${found:#*=}
    _files
}
compdef _hires hires
