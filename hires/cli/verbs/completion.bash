_hires() {
    local line=${COMP_LINE:0:COMP_POINT} words current found
    read -ra words <<<"$line"
    [[ $line == *" " ]] && words+=("")
    current=${words[${#words[@]} - 1]}
    mapfile -t found < <("${words[0]}" _complete "${words[@]:1}" 2>/dev/null)
    # bash breaks words at = and :, and replaces only what follows the last break.
    local last=${current##*[=:]}
    COMPREPLY=("${found[@]#"${current%"$last"}"}")
    [[ ${#found[@]} -gt 0 && ${found[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _hires hires
